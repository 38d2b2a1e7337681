"""What plays the episodes of an actor: its own tools, or the agent of `actor.agent` behind the door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from transformers import AutoTokenizer

from asyncrl.actor.chat import Chat
from asyncrl.actor.door.counts import DoorCounts
from asyncrl.actor.engine.base import Engine
from asyncrl.actor.episode import Limits
from asyncrl.actor.rollout import run_episode
from asyncrl.actor.steps import find_split
from asyncrl.actor.toolbox import Toolbox
from asyncrl.config.schema import TrainConfig
from asyncrl.types import Ticket, Trajectory


@dataclass(frozen=True, slots=True)
class Episodes:
    """`run` plays the episode of a ticket; see `run_episode`."""

    run: Callable[[Ticket], Awaitable[Trajectory]]
    door_counts: DoorCounts | None = None


@asynccontextmanager
async def open_episodes(config: TrainConfig, engine: Engine, tools: Toolbox) -> AsyncIterator[Episodes]:
    """Raises ConfigError: the chat template or the agent does not do."""
    actor = config.actor
    chat = _chat(config, tools)
    split = find_split(actor.step_split)
    if actor.agent is None:
        limits = Limits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens)
        run = partial(run_episode, engine=engine, chat=chat, toolbox=tools, limits=limits, step_split=split)
        yield Episodes(run)
        return
    from asyncrl.actor.door.agent import load_agent
    from asyncrl.actor.door.conversation import ConversationLimits
    from asyncrl.actor.door.episode import run_agent_episode
    from asyncrl.actor.door.server import Door

    agent = load_agent(actor.agent)
    limits_there = ConversationLimits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens, actor.max_total_tokens)
    door = Door(engine, chat, limits_there, actor.door_host, actor.door_port)
    await door.start()
    try:
        play = partial(run_agent_episode, engine=engine, chat=chat, door=door, agent=agent, step_split=split)
        yield Episodes(play, door.counts)
    finally:
        await door.close()


def _chat(config: TrainConfig, tools: Toolbox) -> Chat:
    model = config.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    chat = Chat(tokenizer, config.actor.template_kwargs)
    if tools.names:
        # A template that cannot show tool results is found out now, not at the first call.
        chat.suffix([{"role": "tool", "name": name, "content": ""} for name in tools.names], [])
    return chat
