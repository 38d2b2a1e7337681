"""One episode from its ticket to its trajectory: the state machine, driven by an engine and tools."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from asyncrl.actor.chat import Chat
from asyncrl.actor.engine.base import Engine, Generation
from asyncrl.actor.episode import Episode, EpisodeFailed, Limits, State
from asyncrl.actor.parsing import MalformedCall, parse_tool_calls
from asyncrl.actor.steps import Split, split_steps
from asyncrl.actor.toolbox import OpenTools, Toolbox
from asyncrl.errors import AsyncrlError
from asyncrl.text import reason_of
from asyncrl.types import Sampling, Ticket, ToolCall, Trajectory


class Stopwatch:
    """Seconds by phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self.seconds[phase] += self._clock() - started


async def run_episode(
    ticket: Ticket,
    begin: Callable[[], None],
    engine: Engine,
    chat: Chat,
    toolbox: Toolbox,
    limits: Limits,
    step_split: Split = "turn",
    clock: Callable[[], float] = time.monotonic,
) -> Trajectory:
    """Run the episode that `ticket` permits, and call `begin` once the engine serves its version. The engine's session
    is the ticket's id; it and the tools are released however the episode ends. `timings` hold seconds of wait (for the
    version), generate and tools.

    Raises EpisodeFailed: the episode has no trajectory, because a tool, the engine or the template failed.
    """
    episode, watch = Episode(limits), Stopwatch(clock)
    try:
        with watch("wait"):
            await engine.wait_for_version(ticket.min_version, pin=ticket.pin)
        begin()
        async with toolbox.open(ticket) as tools:
            episode.start(chat.prompt(ticket.task.messages, tools.shown))
            await _converse(episode, ticket, engine, chat, tools, watch)
            rewards = await tools.rewards()
        steps = split_steps(step_split, episode.tokens, episode.turns, chat.piece)
        return episode.trajectory(ticket, steps, rewards, dict(watch.seconds))
    except EpisodeFailed:
        raise
    except AsyncrlError as error:
        episode.fail(reason_of(error))
    finally:
        engine.release(ticket.id)


async def _converse(
    episode: Episode, ticket: Ticket, engine: Engine, chat: Chat, tools: OpenTools, watch: Stopwatch
) -> None:
    """Turn by turn until the episode has ended."""
    while episode.state is State.GENERATING:
        with watch("generate"):
            sampling = Sampling(ticket.temperature, episode.room)
            generation = await engine.generate(episode.tokens, sampling, chat.stop_ids, ticket.id)
        calls = calls_of(generation, chat, tools)
        if episode.generated(generation, calls) is State.TOOL_CALLING:
            with watch("tools"):
                answers = await tools.answer(calls)
            messages = [
                {"role": "tool", "name": call.name, "content": answer}
                for call, answer in zip(calls, answers, strict=True)
            ]
            episode.answered(chat.suffix(messages, tools.shown, int(generation.tokens[-1])))


def calls_of(generation: Generation, chat: Chat, tools: OpenTools) -> Sequence[ToolCall | MalformedCall]:
    """The calls of a turn that the policy ended itself, without its stop token."""
    if generation.finish_reason != "stop":
        return ()
    calls = parse_tool_calls(chat.text(generation.tokens[:-1]), tools.functions)
    if chat.one_call and len(calls) > 1:
        return (MalformedCall(f"Error: one tool call at a time; none of these {len(calls)} was made.", calls[0].name),)
    return calls
