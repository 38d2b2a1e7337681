"""Episodes that agent loops play over a scripted engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncrl.chat.chat import Chat
from asyncrl.compat.verl.agent_loops.player import VerlAgentLoops
from asyncrl.compat.verl.agent_loops.settings import loop_config
from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.types import Task, Trajectory
from tests.episode.fakes import (
    CHATML,
    END,
    Script,
    ScriptedEngine,
    assert_trains_what_was_sampled,
    make_ticket,
    make_tokenizer,
)

TOKENIZER = make_tokenizer(CHATML)
CHAT = Chat(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=400, max_tokens=4000, max_total_tokens=40_000)
TASK = Task("t", [{"role": "user", "content": "5*3?"}], "15", "mine", extra_info={"index": 7, "hint": "three fives"})


def make_player(
    loop: type | str,
    config: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    data: DataConfig | None = None,
    **limits: int,
) -> VerlAgentLoops:
    """A player whose default loop is a class, or has a registered name. `limits` are options of the actor."""
    path = loop if isinstance(loop, str) else f"{loop.__module__}.{loop.__qualname__}"
    actor = replace(ActorConfig(max_tokens=4000, max_turn_tokens=400), **limits)
    made = loop_config(actor, data or DataConfig(), ModelConfig(path="none"), config or {})
    return VerlAgentLoops(path, given or {}, made, TOKENIZER, "qwen3")


def runner_of(player: VerlAgentLoops, script: Script, limits: EpisodeLimits = LIMITS) -> EpisodeRunner:
    return EpisodeRunner(ScriptedEngine(TOKENIZER, script, end=END), CHAT, player, limits)


async def play(
    loop: type | str | VerlAgentLoops,
    script: Script,
    task: Task = TASK,
    limits: EpisodeLimits = LIMITS,
    exact: bool = True,
    **options: Any,
) -> Trajectory:
    """The trajectory of an episode. With `exact`, everything that was sampled must be in it."""
    player = loop if isinstance(loop, VerlAgentLoops) else make_player(loop, **options)
    runner = runner_of(player, script, limits)
    trajectory = await runner.run(replace(make_ticket("t/1"), task=task), lambda: None)
    if exact:
        assert_trains_what_was_sampled(trajectory, runner.engine)
    return trajectory
