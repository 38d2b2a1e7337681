"""The same answers of a server give the same trajectories, bit by bit, as when the digests below were taken."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.commands.demo.tokenizer import END_OF_TURN, build_tokenizer
from asyncrl.engine.fleet.discovery import listed
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.tools.calculator import Calculator
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Purpose, Task, Ticket, Trajectory
from tests.engine.fleet.fakes import EXPECTED, FakeSglang, kept, serving, tensors
from tests.helpers import GENEROUS_S, OWN_RUN

TOKENIZER = build_tokenizer()
LIMITS = EpisodeLimits(max_turns=5, max_turn_tokens=300, max_tokens=1600, max_total_tokens=1600)
EPISODES = 24
DIGESTS = {
    "as sampled": "797bc38d235f3837",
    "as rendered": "bab0bbc22a354b41",
}
"""Digests of all trajectories, without their times. A change that alters them alters what is trained."""


def call(expression: Any, name: str = "calculator", key: str = "expression") -> str:
    arguments = json.dumps({key: expression})
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TURNS = (
    call("5*3") + END_OF_TURN,
    "First: " + call("16 - 3") + END_OF_TURN,
    call("1/3") + "\n" + call("2/0") + END_OF_TURN,
    call("a lot") + END_OF_TURN,
    call("5*3", key="expresion") + END_OF_TURN,
    call(True) + END_OF_TURN,
    call("5*3", name="unheard") + END_OF_TURN,
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": ' + END_OF_TURN,
    "Käse, 日本, \U0001f600 " + call("7 * 0.5") + END_OF_TURN,
    "<think>\n" + call("9*9") + "\n</think>\n\n" + call("9+9") + END_OF_TURN,
    "It ends nowhere " * 30,
    "#### 15" + END_OF_TURN,
)
"""Turns that the policy may write. Most turns call the calculator, so that episodes go on."""


def script_of(episode: int) -> list[str]:
    chosen = np.random.default_rng(episode).choice(len(TURNS), LIMITS.max_turns, p=[0.1] * 9 + [0.04, 0.03, 0.03])
    return [TURNS[index] for index in chosen]


class ScriptedServer(FakeSglang):
    """Answers the requests of each episode with the turns of its script. The prompt's question has the episode's
    number."""

    def __init__(self) -> None:
        super().__init__()
        self.answers["generate"] = self._say

    async def _say(self, body: Any) -> Any:
        text = TOKENIZER.decode(body["input_ids"])
        number = int(text.partition("Question ")[2].partition(":")[0])
        turn = text.count("<|im_start|>assistant\n") - 1
        tokens = TOKENIZER.encode(script_of(number)[turn], add_special_tokens=False)
        tokens = tokens[: body["sampling_params"]["max_new_tokens"]]
        stops = tokens[-1] in body["sampling_params"]["stop_token_ids"]
        logprobs = -np.random.default_rng(len(text)).random(len(tokens), np.float32)
        finish = {"type": "stop", "matched": tokens[-1]} if stops else {"type": "length", "length": len(tokens)}
        meta = {
            "weight_version": self.label,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[float(each), token, None] for each, token in zip(logprobs, tokens, strict=True)],
            "finish_reason": finish,
        }
        return {"output_ids": tokens, "meta_info": meta}


def ticket_of(episode: int) -> Ticket:
    question = {"role": "user", "content": f"Question {episode}: how many eggs are left?"}
    messages = [{"role": "system", "content": "Use the calculator."}] * (episode % 2) + [question]
    name = f"t{episode:03d}.0.0"
    return Ticket(name, Task(f"task-{episode}", messages, "15", "test"), name, 0, Purpose.TRAIN, 1.0, 0)


def digest_of(trajectories: list[Trajectory]) -> str:
    hashed = hashlib.sha256()
    for each in trajectories:
        for column in (each.tokens, each.logprobs, each.version_runs):
            hashed.update(column.tobytes())
        turns = [[*turn[:4], [[made.name, made.arguments] for made in turn.tool_calls]] for turn in each.turns]
        steps = [[*step] for step in each.steps]
        hashed.update(json.dumps([each.id, turns, steps, each.finish, dict(each.rewards)]).encode())
    return hashed.hexdigest()[:16]


@pytest.mark.parametrize("history", DIGESTS)
def test_the_same_answers_give_the_same_trajectories(history: str, tmp_path: Path) -> None:
    async def play() -> list[Trajectory]:
        server = ScriptedServer()
        async with serving(server):
            fleet = Fleet(
                listed([server.url]),
                lambda url: SglangServer(url, context=64),
                expected=EXPECTED,
                vocabulary=len(TOKENIZER),
                folders=Folders(tmp_path, lambda folder: None, OWN_RUN),
            )
            player = ToolPlayer(Toolbox({"calculator": Calculator}, ToolLimits(GENEROUS_S)))
            runner = EpisodeRunner(fleet, Chat(TOKENIZER), player, LIMITS, history == "as rendered")
            async with kept(fleet):
                await fleet.update_weights(3, tensors(3))
                return await asyncio.gather(*(runner.run(ticket_of(each), lambda: None) for each in range(EPISODES)))

    trajectories = asyncio.run(play())
    assert sum(len(each.turns) for each in trajectories) > 4 * EPISODES
    assert {each.finish.value for each in trajectories} == {"completed", "truncated"}
    assert digest_of(trajectories) == DIGESTS[history]
