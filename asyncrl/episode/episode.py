"""Runs an episode, from its ticket to its trajectory.

A player leads the conversation with the policy: `ToolPlayer` answers its tool calls with our own tools and lets a
simulated user respond, an agent requests what it likes (`chat_api`). Each completion goes through `Episode.complete`,
which samples and records it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message
from asyncrl.chat.parsing import ParsedTurn
from asyncrl.chat.template import answer, calling, result, with_reasoning
from asyncrl.engine.base import Engine, Generation
from asyncrl.episode.images import EpisodeImages, ImageDesk, OutgoingImages, TooManyImagesError
from asyncrl.episode.recorder import CompletionRequest, EpisodeLimits, LimitError, Recorder, Reservation
from asyncrl.episode.steps import Split
from asyncrl.errors import BusyError, RefusedError, StoppedError
from asyncrl.grammar import KEY, read_grammar
from asyncrl.observe.spans import NoSpans, Spans, Value
from asyncrl.tools.environments.environments import Environments, OpenEnvironment
from asyncrl.tools.interactions.users import InteractionLimits, Interactions, OpenInteraction
from asyncrl.tools.toolbox import OpenTools, Toolbox
from asyncrl.types import Grammar, Sampling, Ticket, ToolCall, Trajectory

ReadTurn = Callable[[str, bool], ParsedTurn]
"""Reads a turn's text. The second argument is true if the policy ended the turn itself."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn of the policy: `message` as templates take it, which is all text if one of the calls of `turn` is
    malformed. The tokens `prompt` stood before it. `finish_reason` is stop or length. If one of the request's stop
    texts was in it, that is `stop`, and message and turn end before it; all that was `sampled` is recorded."""

    message: Message
    turn: ParsedTurn
    finish_reason: str
    prompt: NDArray[np.int32]
    sampled: Generation
    stop: str = ""


class Episode:
    """The running episode of `ticket`; `seconds` are those of its phases so far."""

    def __init__(self, ticket: Ticket, runner: EpisodeRunner) -> None:
        self.ticket = ticket
        self.chat = runner.chat
        self.limits = runner.limits
        self.images = EpisodeImages(runner.images)
        self.recorder = Recorder(ticket, runner.limits, runner.chat, runner.as_rendered, self.images)
        self.seconds: dict[str, float] = defaultdict(float)
        self.is_over = False
        self._engine = runner.engine
        self._clock = runner.clock
        self._spans = runner.spans
        self._room_changed = asyncio.Event()

    @contextmanager
    def timed(self, phase: str) -> Iterator[dict[str, Value]]:
        """Add the seconds of the body to those of `phase`. The body may say more of it, for the timeline."""
        started = self._clock()
        try:
            with self._spans.span(phase, episode=self.ticket.id) as values:
                yield values
        finally:
            self.seconds[phase] += self._clock() - started

    async def complete(self, request: CompletionRequest, read_turn: ReadTurn) -> Completion:
        """Sample the policy's next turn and record it. If this raises or is cancelled, nothing is recorded.

        Under a grammar the turn is all text: nobody reads calls in it. Raises LimitError: no room is left. Raises
        RefusedError: the chat template does not take the request, the engine takes no grammar, or there are tools
        beside it. Raises EngineError: the engine gave nothing. Raises StoppedError: the episode is over.
        """
        [completion] = await self.complete_all(request, read_turn, 1)
        return completion

    async def complete_all(self, request: CompletionRequest, read_turn: ReadTurn, count: int) -> list[Completion]:
        """As `complete`, for `count` completions, each of which is recorded in a branch of its own; all or none."""
        if request.grammar is not None:
            self._check_grammar(request)
        reservations = await self._reserve(request, count)
        try:
            sampled = await self._generate_all(reservations)
            if self.is_over:
                raise StoppedError("the episode is over")
            for each, tokens in zip(reservations, sampled, strict=True):
                self.recorder.check(each, tokens)
            read = [self._read(request, tokens, read_turn) for tokens in sampled]
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

    def end(self) -> None:
        """Release the engine's sessions, once. Completions in flight will not be recorded."""
        if self.is_over:
            return
        self.is_over = True
        self._room_changed.set()
        for session in (self.ticket.id, *(branch.session for branch in self.recorder.branches)):
            self._engine.release(session)

    async def _reserve(self, request: CompletionRequest, count: int) -> list[Reservation]:
        while not self.is_over:
            with suppress(BusyError):
                return self.recorder.reserve_all(request, count)
            self._room_changed.clear()
            await self._room_changed.wait()
        raise StoppedError("the episode is over")

    async def _generate_all(self, reservations: Sequence[Reservation]) -> list[Generation]:
        """The first error ends all."""
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
            place = self.chat.stop_ids, branch.session
            sampled = await self._engine.generate(branch.tokens, sampling, *place, **shown)
            if images:
                values["images"] = len(images)
            values |= {"prompt_tokens": len(branch), "tokens": len(sampled.tokens), "finish": sampled.finish_reason}
            if len(sampled.versions):
                values["version"] = int(sampled.versions[-1])
        return sampled

    def _read(self, request: CompletionRequest, sampled: Generation, read_turn: ReadTurn) -> _ReadText:
        """What was sampled, and what the caller gets of it."""
        ended = sampled.finish_reason == "stop"
        text = self.chat.text(sampled.tokens[:-1] if ended else sampled.tokens)
        read = (lambda part, _: ParsedTurn(part)) if request.grammar is not None else read_turn
        whole = read(text, ended)
        found = [(place, stop) for stop in request.stop if (place := text.find(stop)) >= 0]
        if not found:
            return _ReadText(whole, whole)
        place, stop = min(found)
        return _ReadText(whole, read(text[:place], True), stop, text[place:].strip() == stop.strip())

    def _record(self, reservation: Reservation, sampled: Generation, read: _ReadText) -> Completion:
        prompt, message = reservation.branch.tokens, _message(read.shown)
        calls = [call for call in read.shown.calls if isinstance(call, ToolCall)]
        shown = message if read.only_stop else None
        self.recorder.record(reservation, sampled, _message(read.whole), calls, shown)
        finish = "stop" if read.stop else sampled.finish_reason
        return Completion(message, read.shown, finish, prompt, sampled, read.stop)


class _ReadText(NamedTuple):
    """A turn, `whole` and as it is `shown`, up to the text `stop`. `only_stop`: nothing else was cut off."""

    whole: ParsedTurn
    shown: ParsedTurn
    stop: str = ""
    only_stop: bool = False


def _message(turn: ParsedTurn) -> Message:
    """A turn as templates take it."""
    if made := turn.made:
        message = calling([call.arguments for call in made], [call.name for call in made], turn.content, turn.ids)
    else:
        message = answer(turn.content)
    return with_reasoning(message, turn.reasoning)


class Player(Protocol):
    """Leads the conversations of episodes."""

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Lead one to its end. Returns rewards of its environment by name; may raise anything."""
        ...

    def counters(self) -> Mapping[str, float]:
        """What it counts, by the names of metrics."""
        ...


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of `player` over `engine`. `as_rendered` as for Recorder, `step_split` as for `split_steps`. The
    phases of each episode go to `spans`. `demonstrate` records the demonstrations that tickets ask for. `images` reads
    those of messages, if the policy sees any; those of a trajectory are `outgoing` until it is delivered."""

    engine: Engine
    chat: Chat
    player: Player
    limits: EpisodeLimits
    as_rendered: bool = False
    step_split: Split = "turn"
    clock: Callable[[], float] = time.monotonic
    spans: Spans = field(default_factory=NoSpans)
    demonstrate: Callable[[Ticket], Trajectory] | None = None
    images: ImageDesk | None = None
    outgoing: OutgoingImages = field(default_factory=OutgoingImages)

    async def run(self, ticket: Ticket, begin: Callable[[], None]) -> Trajectory:
        """Run the episode that `ticket` permits, or record the demonstration of its task; call `begin` once the engine
        serves its version. The trajectory's `timings` are seconds by phase: `wait` for the version, `generate`, and
        those of the player.

        Raises whatever the player raises, InvariantError: see Recorder; RefusedError: nothing here records
        demonstrations, or see DemonstrationRecorder. The episode has no trajectory then.
        """
        if ticket.task.demonstration:
            if self.demonstrate is None:
                raise RefusedError("data.demonstration is not set here, so that a demonstration cannot be recorded")
            begin()
            return self.demonstrate(ticket)
        episode = Episode(ticket, self)
        try:
            with episode.timed("wait"):
                await self.engine.wait_for_version(ticket.min_version, pin=ticket.pin)
            begin()
            rewards = await self.player(episode)
            trajectory = episode.recorder.trajectory(rewards, dict(episode.seconds), self.step_split)
            self.outgoing.keep(ticket.id, episode.recorder.images())
            return trajectory
        finally:
            episode.end()


Watch = Callable[[Sequence[Message]], None]
"""Gets the messages of a conversation: first those of the prompt, then each that follows."""


def unwatched(messages: Sequence[Message]) -> None:
    """A `Watch` that does nothing."""


@dataclass(frozen=True)
class ToolPlayer:
    """Answers the policy's tool calls with the tools of `toolbox`, or with those of the episode's environment. Where it
    calls none, the task's user among `interactions` responds. The episode ends when the user ends it, without a user at
    the first turn that calls no tool, or at a limit. Turns are sampled under the grammar of the task, or under
    `grammar` where it names none. `watch` gets the messages of each conversation, as they come."""

    toolbox: Toolbox | Environments
    grammar: Grammar | None = None
    interactions: Interactions = field(default_factory=lambda: Interactions({}, InteractionLimits()))
    watch: Watch = unwatched

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        ticket = episode.ticket
        async with self.toolbox.open(ticket) as tools, self.interactions.open(ticket) as user:
            await self._converse(episode, tools, user)
            return await tools.rewards()

    def counters(self) -> Mapping[str, float]:
        of_users = {f"interaction_{name}": count for name, count in asdict(self.interactions.counts).items()}
        return {**self.toolbox.counters(), **of_users}

    async def _converse(
        self, episode: Episode, tools: OpenTools | OpenEnvironment, user: OpenInteraction | None
    ) -> None:
        def read_turn(text: str, ended: bool) -> ParsedTurn:
            return episode.chat.parse(text, tools.functions) if ended else ParsedTurn(text)

        task, recorder = episode.ticket.task, episode.recorder
        messages = await episode.images.show(tools.prompt(task.messages))
        form = task.extra_info.get(KEY)
        grammar = self.grammar if form is None else read_grammar(form)
        self.watch(messages)
        while True:
            try:
                request = CompletionRequest(messages, tuple(tools.shown), grammar=grammar)
                completion = await episode.complete(request, read_turn)
            except LimitError:
                if not recorder.completions:
                    raise
                return
            messages = (*messages, completion.message)
            self.watch(messages[-1:])
            try:
                following = await self._following(episode, tools, user, messages, completion)
            except TooManyImagesError:
                recorder.truncated = True
                return
            if not following:
                return
            self.watch(following)
            messages += following

    async def _following(
        self,
        episode: Episode,
        tools: OpenTools | OpenEnvironment,
        user: OpenInteraction | None,
        messages: tuple[Message, ...],
        completion: Completion,
    ) -> tuple[Message, ...]:
        """The messages behind `completion`, with which `messages` end: results of its calls, or the user's response.
        None if the episode is over."""
        recorder = episode.recorder
        if calls := completion.turn.calls:
            if not recorder.turns_left:
                recorder.truncated = True
                return ()
            with episode.timed("tools"):
                results = await tools.answer(calls)
            answered = zip(calls, results, completion.turn.ids, strict=True)
            return await episode.images.show([result(content, call.name, id) for call, content, id in answered])
        if user is None or completion.finish_reason != "stop":
            return ()
        with episode.timed("user"):
            reply = await user.respond(messages)
        if reply.score is not None:
            recorder.score(reply.score)
        if reply.ends:
            return ()
        if not (recorder.turns_left and user.may_go_on):
            recorder.truncated = True
            return ()
        return await episode.images.show([{"role": "user", "content": reply.content}])
