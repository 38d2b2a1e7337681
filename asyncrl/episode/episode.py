"""Runs an episode. It begins with a ticket, the replay's permission to play a task, and ends with a trajectory.

The runner waits until the engine serves the ticket's version, lets a player lead the conversation, and builds the
trajectory from the record. The player is `ToolPlayer` (`tool_player`), with asyncrl's own tools and users, or an agent
(`agents.chat_api`), which requests completions in any order.

`Episode.complete_all` makes each turn of the policy: it reserves room for the turn, samples it, reads it and records
it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.chat.chat import Chat
from asyncrl.engine.base import Engine, Generation
from asyncrl.episode.completions import Completion, ReadText, ReadTurn, message_of, read_sampled
from asyncrl.episode.images import EpisodeImages, ImageDesk, OutgoingImages
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.recorder import CompletionRequest, Recorder, Reservation
from asyncrl.episode.steps import Split
from asyncrl.errors import BusyError, RefusedError, StoppedError
from asyncrl.grammar import KEY
from asyncrl.observe.spans import NoSpans, Spans, Value
from asyncrl.types import Sampling, Ticket, ToolCall, Trajectory

LONGEST_WAIT_S = 120.0
"""The seconds that an episode may wait for the newest version. Transfers of large models take less, and episodes that
wait for a version that never comes would keep the learner from its next batch."""


class Player(Protocol):
    """Leads the conversations of episodes."""

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Lead one conversation to its end. Returns the rewards that the conversation's environment gave, by name. A
        player may raise any exception.

        The player calls `episode.begin` once it has what it needs to play: the time before is no part of the episode.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """The player's counts, by the names of metrics."""
        ...


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of `player` over `engine`.

    - `as_rendered`: see Recorder; `step_split`: see `split_steps`.
    - `spans` records the phases of each episode.
    - `demonstrate` records the demonstration of a task. It is called for tickets that ask for the demonstration instead
      of an episode.
    - `longest_wait_s`: the seconds after which an episode may start with its ticket's fallback version.
    - `images` reads the images of messages, if the policy sees images. `outgoing` keeps the images of a trajectory
      until it is delivered.
    """

    engine: Engine
    chat: Chat
    player: Player
    limits: EpisodeLimits
    as_rendered: bool = False
    step_split: Split = "turn"
    clock: Callable[[], float] = time.monotonic
    spans: Spans = field(default_factory=NoSpans)
    demonstrate: Callable[[Ticket], Trajectory] | None = None
    longest_wait_s: float = LONGEST_WAIT_S
    images: ImageDesk | None = None
    outgoing: OutgoingImages = field(default_factory=OutgoingImages)

    async def run(self, ticket: Ticket, begin: Callable[[], None]) -> Trajectory:
        """Run the episode that `ticket` asks for, or record the demonstration of its task.

        `begin` is called once the engine serves the ticket's version and the player begins to play. The trajectory's
        `timings` maps phases to seconds. The phases are `wait` (for the version), `generate`, and those of the player.
        Raises the player's exceptions; InvariantError: see Recorder; RefusedError: this runner records no
        demonstrations, or see DemonstrationRecorder.
        """
        if ticket.task.demonstration:
            if self.demonstrate is None:
                raise RefusedError("data.demonstration is not set on this actor, so no demonstration can be recorded")
            begin()
            return self.demonstrate(ticket)
        episode = Episode(ticket, self, begin)
        try:
            with episode.timed("wait"):
                await self._wait_for_version(ticket)
            rewards = await self.player(episode)
            trajectory = episode.recorder.trajectory(rewards, dict(episode.seconds), self.step_split)
            self.outgoing.keep(ticket.id, episode.recorder.images())
            return trajectory
        finally:
            episode.end()

    async def _wait_for_version(self, ticket: Ticket) -> None:
        """Return once the engine serves a version with which the episode may start."""
        if ticket.fallback_version is not None:
            # An engine that refuses or cannot read a version gets the next one only if episodes go on.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.longest_wait_s):
                    return await self.engine.wait_for_version(ticket.min_version, pin=ticket.pin)
            return await self.engine.wait_for_version(ticket.fallback_version, pin=ticket.pin)
        await self.engine.wait_for_version(ticket.min_version, pin=ticket.pin)


class Episode:
    """The running episode of `ticket`. Its player calls `begin` when it begins to play. `seconds` has the time of each
    phase so far."""

    def __init__(self, ticket: Ticket, runner: EpisodeRunner, begin: Callable[[], None]) -> None:
        self.ticket = ticket
        self.begin = begin
        self.chat = runner.chat
        self.limits = runner.limits
        self.images = EpisodeImages(runner.images)
        self.recorder = Recorder(ticket, runner.limits, runner.chat, runner.as_rendered, self.images)
        self.seconds: dict[str, float] = defaultdict(float)
        self.is_over = False
        self._engine = runner.engine
        self._clock = runner.clock
        self._spans = runner.spans
        self._running: Counter[str] = Counter()
        self._counted_until: dict[str, float] = {}
        self._room_changed = asyncio.Event()

    async def complete(self, request: CompletionRequest, read_turn: ReadTurn) -> Completion:
        """Sample the policy's next turn and record it. If this raises or is cancelled, nothing is recorded.

        A turn that was sampled under a grammar is not searched for calls.

        Raises LimitError: no room is left. Raises RefusedError: the chat template does not take the request, the engine
        takes no grammars, or the request has a grammar and tools. Raises EngineError: the engine failed. Raises
        StoppedError: the episode is over.
        """
        [completion] = await self.complete_all(request, read_turn, 1)
        return completion

    async def complete_all(self, request: CompletionRequest, read_turn: ReadTurn, count: int) -> list[Completion]:
        """Sample `count` turns, and record each in its own branch. If one of them fails, no turn is recorded. Raises as
        `complete`."""
        if request.grammar is not None:
            self._check_grammar(request)
        reservations = await self._reserve(request, count)
        try:
            sampled = await self._generate_all(reservations)
            if self.is_over:
                raise StoppedError("the episode is over")
            for each, tokens in zip(reservations, sampled, strict=True):
                self.recorder.check(each, tokens)
            read = [read_sampled(self.chat, request, tokens, read_turn) for tokens in sampled]
        except BaseException:
            for each in reservations:
                if session := self.recorder.cancel(each):
                    self._engine.release(session)
            raise
        finally:
            self._room_changed.set()
        return [self._record(*each) for each in zip(reservations, sampled, read, strict=True)]

    def _check_grammar(self, request: CompletionRequest) -> None:
        if not self._engine.takes_grammars:
            raise RefusedError(
                f"{KEY}: this engine samples without grammars; leave it out, or set engine.kind to sglang or vllm"
            )
        if request.tools:
            raise RefusedError(
                f"{KEY} with tools: a turn under a grammar cannot call them; leave out the tools or {KEY}"
            )

    async def _reserve(self, request: CompletionRequest, count: int) -> list[Reservation]:
        """Reserve room for the completions. While completions in flight may still need this room, wait."""
        while not self.is_over:
            with suppress(BusyError):
                return self.recorder.reserve_all(request, count)
            self._room_changed.clear()
            await self._room_changed.wait()
        raise StoppedError("the episode is over")

    async def _generate_all(self, reservations: Sequence[Reservation]) -> list[Generation]:
        """Sample all completions at once. The first error cancels the other completions."""
        if len(reservations) == 1:
            return [await self._generate(reservations[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(each)) for each in reservations]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _generate(self, reservation: Reservation) -> Generation:
        branch = reservation.branch
        with self.timed("generate") as values:
            request = reservation.request
            sampling = Sampling(self.ticket.temperature, branch.reserved, request.grammar, request.alternatives)
            images = branch.images_within(len(branch))
            shown: dict[str, Any] = {"images": images} if images else {}
            sampled = await self._engine.generate(branch.tokens, sampling, self.chat.stop_ids, branch.session, **shown)
            if images:
                values["images"] = len(images)
            values |= {"prompt_tokens": len(branch), "tokens": len(sampled.tokens), "finish": sampled.finish_reason}
            if len(sampled.versions):
                values["version"] = int(sampled.versions[-1])
        return sampled

    def _record(self, reservation: Reservation, sampled: Generation, read: ReadText) -> Completion:
        prompt, message = reservation.branch.tokens, message_of(read.shown)
        # A request that repeats the same object is compared faster than one that repeats an equal object.
        whole = message if read.whole is read.shown else message_of(read.whole)
        calls = [call for call in read.shown.calls if isinstance(call, ToolCall)]
        shown = message if read.only_stop else None
        self.recorder.record(reservation, sampled, whole, calls, shown)
        finish = "stop" if read.stop else sampled.finish_reason
        return Completion(message, read.shown, finish, prompt, sampled, read.stop)

    @contextmanager
    def timed(self, phase: str) -> Iterator[dict[str, Value]]:
        """Add to `phase` the seconds that the body of the `with` statement takes. If several bodies run at once, these
        seconds are added once. The body may add values for the timeline to the yielded dictionary."""
        self._count(phase, 1)
        try:
            with self._spans.span(phase, episode=self.ticket.id) as values:
                yield values
        finally:
            self._count(phase, -1)

    def _count(self, phase: str, change: int) -> None:
        """Count the seconds of a phase up to now, and change the number of its bodies that run."""
        now = self._clock()
        if self._running[phase]:
            self.seconds[phase] += now - self._counted_until[phase]
        self._counted_until[phase] = now
        self._running[phase] += change

    def end(self) -> None:
        """End the episode: release the engine's sessions. Completions that are still in flight will not be recorded. A
        second call does nothing."""
        if self.is_over:
            return
        self.is_over = True
        self._room_changed.set()
        for session in (self.ticket.id, *(branch.session for branch in self.recorder.branches)):
            self._engine.release(session)
