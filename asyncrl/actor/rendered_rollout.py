"""One episode with our own tools that goes on from the template's rendering: `actor.history=template`.

Where the template renders what was said as it was sampled, the episode is one sequence, as in `rollout`. Where it
rewrites it, a new branch begins with the rendering as its prompt, as in an agent's conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.branch import trajectory_of
from asyncrl.actor.chat_api.conversation import Conversation, ConversationLimits, LimitError
from asyncrl.actor.chat_api.messages import Ask, Message, answer_message, read_answer
from asyncrl.actor.engine.base import Engine, Generation
from asyncrl.actor.episode import EpisodeFailed, State
from asyncrl.actor.parsing import MalformedCall
from asyncrl.actor.rollout import Stopwatch, calls_of
from asyncrl.actor.steps import Split
from asyncrl.actor.toolbox import OpenTools, Toolbox
from asyncrl.errors import AsyncrlError
from asyncrl.types import Sampling, Ticket, ToolCall, Trajectory


async def run_rendered_episode(
    ticket: Ticket,
    begin: Callable[[], None],
    engine: Engine,
    chat: Chat,
    toolbox: Toolbox,
    limits: ConversationLimits,
    step_split: Split = "turn",
    clock: Callable[[], float] = time.monotonic,
) -> Trajectory:
    """Run the episode that `ticket` permits, as `run_episode` does. The engine's sessions are those of the branches.

    Raises EpisodeFailed: the episode has no trajectory, because a tool, the engine or the template failed.
    """
    conversation, watch = Conversation(ticket.id, chat, limits, as_rendered=True), Stopwatch(clock)
    try:
        with watch("wait"):
            await engine.wait_for_version(ticket.min_version, pin=ticket.pin)
        begin()
        async with toolbox.open(ticket) as tools:
            truncated = await _converse(conversation, ticket, engine, chat, tools, limits.max_turns, watch)
            rewards = await tools.rewards()
        branches = conversation.answered()
        if not branches:
            raise EpisodeFailed(State.FAILED, "the prompt leaves no room for an answer: raise actor.max_tokens")
        return trajectory_of(ticket, branches, truncated, chat, rewards, dict(watch.seconds), step_split)
    except EpisodeFailed:
        raise
    except AsyncrlError as error:
        raise EpisodeFailed(State.FAILED, f"{type(error).__name__}: {error}") from error
    finally:
        engine.release(ticket.id)
        for branch in conversation.branches:
            engine.release(branch.name)


async def _converse(
    conversation: Conversation,
    ticket: Ticket,
    engine: Engine,
    chat: Chat,
    tools: OpenTools,
    max_turns: int,
    watch: Stopwatch,
) -> bool:
    """Turn by turn until the policy calls no more tools (False), or a limit ends the episode (True)."""
    messages: list[Any] = list(ticket.task.messages)
    while True:
        try:
            place = conversation.prepare(Ask(tuple(messages), tuple(tools.shown), None, False))
        except LimitError:
            return True
        branch = place.branch
        with watch("generate"):
            sampling = Sampling(ticket.temperature, branch.reserved)
            generation = await engine.generate(branch.tokens, sampling, chat.stop_ids, branch.name)
        if generation.finish_reason == "abort":
            raise EpisodeFailed(State.ABORTED, "the engine aborted the generation")
        calls = calls_of(generation, chat, tools)
        made = [call for call in calls if isinstance(call, ToolCall)]
        said = _message(generation, calls, made, chat)
        conversation.record(place, generation, said, made)
        if generation.finish_reason != "stop" or not calls:
            return generation.finish_reason != "stop"
        if conversation.answers == max_turns:
            return True
        with watch("tools"):
            answers = await tools.answer(calls)
        results = [
            {"role": "tool", "name": call.name, "content": answer} for call, answer in zip(calls, answers, strict=True)
        ]
        messages += [said, *results]


def _message(
    generation: Generation, calls: Sequence[ToolCall | MalformedCall], made: Sequence[ToolCall], chat: Chat
) -> Message:
    """The policy's turn as templates take it; one with a malformed call is all text."""
    ended = generation.finish_reason == "stop"
    text = chat.text(generation.tokens[:-1] if ended else generation.tokens)
    return read_answer(answer_message(text, made if len(made) == len(calls) else []))
