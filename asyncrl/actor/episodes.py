"""What plays the episodes of an actor: its own tools, or the agent of `actor.agent` behind the door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from asyncrl.actor.chat_api.conversation import ConversationLimits
from asyncrl.actor.chat_api.counts import DoorCounts
from asyncrl.actor.chat_checks import check_tools, open_chat, report_rewritings
from asyncrl.actor.engine.base import Engine
from asyncrl.actor.episode import Limits
from asyncrl.actor.rendered_rollout import run_rendered_episode
from asyncrl.actor.rollout import run_episode
from asyncrl.actor.steps import find_split
from asyncrl.actor.toolbox import Toolbox
from asyncrl.actor.worker import RunEpisode
from asyncrl.config.schema import TrainConfig


@dataclass(frozen=True, slots=True)
class Episodes:
    """`run` plays the episode of a ticket; see `run_episode`."""

    run: RunEpisode
    door_counts: DoorCounts | None = None


@asynccontextmanager
async def open_episodes(config: TrainConfig, engine: Engine, tools: Toolbox) -> AsyncIterator[Episodes]:
    """Raises ConfigError: the chat template or the agent does not do."""
    actor = config.actor
    chat = open_chat(config)
    report_rewritings(chat, actor.history)
    split = find_split(actor.step_split)
    of_branches = ConversationLimits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens, actor.max_total_tokens)
    as_rendered = actor.history == "template"
    if actor.agent is None:
        check_tools(chat, tools.functions)
        if as_rendered:
            rendered = partial(run_rendered_episode, limits=of_branches)
            yield Episodes(partial(rendered, engine=engine, chat=chat, toolbox=tools, step_split=split))
            return
        limits = Limits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens)
        yield Episodes(partial(run_episode, engine=engine, chat=chat, toolbox=tools, limits=limits, step_split=split))
        return
    from asyncrl.actor.chat_api.agent import load_agent
    from asyncrl.actor.chat_api.episode import run_agent_episode
    from asyncrl.actor.chat_api.server import Door

    agent = load_agent(actor.agent)
    door = Door(engine, chat, of_branches, actor.chat_api_host, actor.chat_api_port, as_rendered=as_rendered)
    await door.start()
    try:
        play = partial(run_agent_episode, engine=engine, chat=chat, door=door, agent=agent, step_split=split)
        yield Episodes(play, door.counts)
    finally:
        await door.close()
