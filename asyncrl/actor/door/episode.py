"""One episode of an agent from outside: from its ticket to its trajectory.

A ticket gives exactly one trajectory, whatever the agent did: that of the conversation's main branch (see
Conversation). What was sampled in other branches is not trained, and is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from asyncrl.actor.chat import Chat
from asyncrl.actor.door.agent import Agent
from asyncrl.actor.door.conversation import Branch
from asyncrl.actor.door.server import Door, Seat
from asyncrl.actor.engine.base import Engine
from asyncrl.actor.episode import EpisodeFailed, State
from asyncrl.actor.steps import Split, split_steps
from asyncrl.errors import AsyncrlError
from asyncrl.types import Finish, Role, Ticket, Trajectory


async def run_agent_episode(
    ticket: Ticket,
    engine: Engine,
    chat: Chat,
    door: Door,
    agent: Agent,
    step_split: Split = "turn",
    clock: Callable[[], float] = time.monotonic,
) -> Trajectory:
    """Run `agent` on the ticket's task. `timings` hold seconds of wait (for the version), generate and agent.

    Raises EpisodeFailed: the agent raised or asked nothing, or the engine failed.
    """
    started = clock()
    try:
        await engine.wait_for_version(ticket.min_version, pin=ticket.pin)
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
    branch = seat.conversation.main()
    if branch is None:
        raise EpisodeFailed(State.FAILED, "the agent ended without having asked the policy anything")
    try:
        return _trajectory(seat, branch, chat, rewards, timings, step_split)
    except AsyncrlError as error:
        raise EpisodeFailed(State.FAILED, f"{type(error).__name__}: {error}") from error


async def _run(agent: Agent, seat: Seat) -> Mapping[str, float]:
    try:
        rewards = await agent(seat.ticket.task, seat.base_url, seat.api_key)
    except Exception as error:
        cause = seat.fault or error
        raise EpisodeFailed(State.FAILED, f"the agent failed: {type(cause).__name__}: {cause}") from error
    if seat.fault is not None:
        raise EpisodeFailed(State.FAILED, f"{type(seat.fault).__name__}: {seat.fault}")
    return rewards or {}


def _trajectory(
    seat: Seat,
    branch: Branch,
    chat: Chat,
    rewards: Mapping[str, float],
    timings: Mapping[str, float],
    step_split: Split,
) -> Trajectory:
    """The branch up to the last token that was sampled in it."""
    last = max(index for index, turn in enumerate(branch.turns) if turn.role is Role.ASSISTANT)
    turns = tuple(branch.turns[: last + 1])
    end = turns[-1].end
    completed = turns[-1].finish_reason == "stop" and not seat.conversation.truncated
    ticket = seat.ticket
    return Trajectory(
        id=ticket.id,
        task_id=ticket.task.id,
        group_id=ticket.group_id,
        member=ticket.member,
        tokens=branch.tokens[:end],
        loss_mask=branch.loss_mask[:end],
        logprobs=branch.logprobs[:end],
        versions=branch.versions[:end],
        turns=turns,
        steps=split_steps(step_split, branch.tokens, turns, chat.piece),
        finish=Finish.COMPLETED if completed else Finish.TRUNCATED,
        rewards={name: float(value) for name, value in rewards.items()},
        timings=timings,
    )
