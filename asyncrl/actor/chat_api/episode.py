"""One episode of an agent from outside: from its ticket to its trajectory.

A ticket gives exactly one trajectory, whatever the agent did: all branches of the conversation that have an answer (see
Conversation), that of the last answer last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.agent import Agent
from asyncrl.actor.chat_api.branch import trajectory_of
from asyncrl.actor.chat_api.server import Door, Seat
from asyncrl.actor.engine.base import Engine
from asyncrl.actor.episode import EpisodeFailed, State
from asyncrl.actor.steps import Split
from asyncrl.errors import AsyncrlError
from asyncrl.text import reason_of
from asyncrl.types import Ticket, Trajectory


async def run_agent_episode(
    ticket: Ticket,
    begin: Callable[[], None],
    engine: Engine,
    chat: Chat,
    door: Door,
    agent: Agent,
    step_split: Split = "turn",
    clock: Callable[[], float] = time.monotonic,
) -> Trajectory:
    """Run `agent` on the ticket's task; `begin` as for `run_episode`. `timings` hold seconds of wait (for the version),
    generate and agent.

    Raises EpisodeFailed: the agent raised or asked nothing, or the engine failed.
    """
    started = clock()
    try:
        await engine.wait_for_version(ticket.min_version, pin=ticket.pin)
        begin()
        begun = clock()
        async with door.open(ticket) as seat:
            rewards = await _run(agent, seat)
    finally:
        engine.release(ticket.id)
    timings = {
        "wait": begun - started,
        "generate": seat.generate_s,
        "agent": max(0.0, clock() - begun - seat.generate_s),
    }
    if not seat.conversation.answers:
        raise EpisodeFailed(State.FAILED, "the agent ended without having asked the policy anything")
    try:
        conversation = seat.conversation
        branches, truncated = conversation.answered(), conversation.truncated
        return trajectory_of(ticket, branches, truncated, chat, rewards, timings, step_split)
    except AsyncrlError as error:
        raise EpisodeFailed(State.FAILED, reason_of(error)) from error


async def _run(agent: Agent, seat: Seat) -> Mapping[str, float]:
    try:
        rewards = await agent(seat.ticket.task, seat.base_url, seat.api_key)
    except Exception as error:
        cause = seat.fault or error
        raise EpisodeFailed(State.FAILED, f"the agent failed: {reason_of(cause)}") from error
    if seat.fault is not None:
        raise EpisodeFailed(State.FAILED, reason_of(seat.fault))
    return rewards or {}
