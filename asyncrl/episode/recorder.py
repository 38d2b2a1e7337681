"""Records the tokens that the policy saw and sampled in an episode, and builds the trajectory from them.

This is the only builder of the trajectory of an episode that asyncrl plays: tool episodes, agents and demonstrations
all record here. Nothing here waits or does I/O.

An episode has one or more token sequences, called branches. A request for a completion repeats the whole conversation,
and one of three things happens:

* The request only adds messages to a recorded completion at the end of a branch. Then the exact suffix of the chat
  template continues this branch.
* The request only adds messages to a recorded completion after which the branch has more tokens. Then a new branch
  begins with a copy of the tokens up to the completion, and the suffix.
* The request continues no completion. Then a new branch begins with the whole conversation as its prompt. In this
  prompt, earlier completions are context, which is not trained. The prompt has the tool calls of the completions that
  it repeats.

A request in tokens continues a completion if it begins with the tokens of the completion's branch up to the end of the
completion. If several completions fit, it continues the one with the most tokens before its end.

A completion that was cut at a limit lacks the end token of its turn. If, apart from this, the template's rendering
equals the tokens, the end token is added as context; otherwise a new branch begins. With `as_rendered` every completion
is compared with the rendering in this way.

Room for a request is reserved first. The request is then recorded or cancelled. Requests may be in flight at the same
time, and end in any order. These invariants hold:

* Each completion is in the loss mask of exactly one branch, the one in which it was sampled, with its log-probs and
  versions. In other branches, copies of it are context.
* No token of a branch is older than the tokens before it: it was sampled, or written by the template, after them.
* The limits hold, including the room that is reserved for completions in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message, same_thoughts, same_value
from asyncrl.engine.base import Generation, PlacedImage, collapsed
from asyncrl.episode.branches import Branch, Prefix, image_arrays, moved, routed_experts
from asyncrl.episode.images import EpisodeImages, GivenTokens
from asyncrl.episode.limits import EpisodeLimits, LimitError
from asyncrl.episode.repeated_calls import repeated_calls
from asyncrl.episode.steps import Split, split_steps
from asyncrl.errors import BusyError, EngineError, InvariantError, RefusedError
from asyncrl.types import MAX_IMAGES, NO_MASS, Finish, Grammar, Role, Ticket, ToolCall, Trajectory, Turn, runs_of


class CompletionRequest(NamedTuple):
    """A request for a completion: all messages so far and the tools, both in the form that templates take.

    - `max_tokens`: the caller's own limit of tokens for the completion
    - `grammar`: the grammar that the completion obeys; None: no grammar
    - `stop`: texts at which the completion ends for the caller, who gets only the part before the first such text
    - `alternatives`: how many of the most likely tokens at each position the caller wants, with their log-probs. The
      engine may give none
    - `tokens` int32[T]: the conversation so far as tokens, from a caller that renders messages itself. `messages` and
      `tools` are then empty
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    max_tokens: int | None = None
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    alternatives: int = 0
    tokens: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room for the completion of `request` at the end of `branch`.

    Before the request, the branch had `start` tokens, or 0 if it is new. `after_refusal` is true if a limit refused a
    request before this one was reserved.
    """

    request: CompletionRequest
    branch: Branch
    start: int
    after_refusal: bool


class Recorder:
    """Records the branches of the episode of `ticket`. The names of their sessions begin with the ticket's id.

    `truncated` becomes true when a limit refuses a request. It becomes false again when a later request is completed,
    because an agent may shorten its history to make room.
    """

    def __init__(
        self,
        ticket: Ticket,
        limits: EpisodeLimits,
        chat: Chat,
        as_rendered: bool = False,
        images: EpisodeImages | None = None,
    ) -> None:
        self.branches: list[Branch] = []
        self.completions: list[Prefix] = []
        self.truncated = False
        self._ticket = ticket
        self._limits = limits
        self._chat = chat
        self._as_rendered = as_rendered
        self._images = images or EpisodeImages(None)
        self._sessions = (f"{ticket.id}/{number}" for number in count(1))

    @property
    def turns_left(self) -> int:
        """The number of completions that the episode may still have."""
        return self._limits.max_turns - len(self.completions)

    def reserve(self, request: CompletionRequest) -> Reservation:
        """Reserve room for the completion of `request`. The caller must pass the result to `record` or `cancel`.

        Raises RefusedError: the chat template does not take the request. Raises LimitError: there is no room, or the
        policy sampled the placeholder of an image. Raises BusyError: there is no room now, but there may be when
        completions in flight end.
        """
        prefix, (added, images) = self._continuation(request)
        if prefix is not None and (images or prefix.images) and self._images.forged(prefix.tokens, prefix.images):
            self.truncated = True
            reason = (
                "the policy wrote the placeholder of an image or a video, which an engine would take for a real image"
            )
            raise LimitError("image_placeholder", reason)
        extends = prefix is not None and prefix.is_last and not prefix.branch.reserved
        seen = len(added) + (prefix.turn.end if prefix else 0)
        new = len(added) if extends else seen
        self._check_images(images if extends else [*(prefix.images if prefix else ()), *images])
        in_flight = [branch for branch in self.branches if branch.reserved]
        room = self._room(seen, new, in_flight)
        if room < 1:
            if self._room(seen, new, []) > 0:
                raise BusyError("completions in flight may take the rest of the episode's room")
            self.truncated = True
            raise self._limits.refusal(self.turns_left, seen, sum(map(len, self.branches)) + new)
        if prefix and extends:
            branch, start = prefix.branch, prefix.turn.end
        else:
            branch, start = Branch(next(self._sessions), self._limits.max_tokens), 0
            self.branches.append(branch)
            if prefix:
                turns = prefix.branch.turns_within(prefix.turn.end)
                calls = [call for turn in turns for call in turn.tool_calls]
                branch.add(prefix.tokens, Role.PROMPT, calls, images=prefix.images)
        if len(added):
            calls = [] if prefix else repeated_calls(request.messages, self.completions)
            branch.add(added, Role.TOOL if prefix else Role.PROMPT, calls, images=images)
        branch.reserved = min(room, request.max_tokens or room)
        return Reservation(request, branch, start, self.truncated)

    def reserve_all(self, request: CompletionRequest, count: int) -> list[Reservation]:
        """Reserve room for `count` completions of a request, each in its own branch. If there is no room for all of
        them, nothing is reserved.

        Raises as `reserve`.
        """
        others = any(branch.reserved for branch in self.branches)
        made: list[Reservation] = []
        try:
            while len(made) < count:
                made.append(self.reserve(request))
        except (RefusedError, BusyError) as error:
            for each in reversed(made):
                self.cancel(each)
            if isinstance(error, BusyError) and made and not others:
                self.truncated = True
                code = "turn_limit" if self.turns_left < count else "context_length_exceeded"
                raise LimitError(code, f"the episode has no room for {count} completions at once") from error
            raise
        return made

    @staticmethod
    def check(reservation: Reservation, sampled: Generation) -> None:
        """Raises EngineError: the engine aborted the completion, or returned more tokens than reserved."""
        tokens, reserved = len(sampled.tokens), reservation.branch.reserved
        if sampled.finish_reason == "abort" or tokens == 0:
            raise EngineError("the engine aborted the generation")
        if tokens > reserved or sampled.finish_reason not in ("stop", "length"):
            finish = sampled.finish_reason
            raise EngineError(f"the engine gave {tokens} tokens of at most {reserved}, finish reason {finish!r}")

    def record(
        self,
        reservation: Reservation,
        sampled: Generation,
        answer: Message,
        calls: Sequence[ToolCall],
        shown: Message | None = None,
    ) -> None:
        """Record a completion, in which the policy made `calls`.

        Later requests repeat it as the message `answer`, or as `shown` (see Prefix). Raises EngineError: see `check`.
        In this case nothing is recorded.
        """
        self.check(reservation, sampled)
        request, branch = reservation.request, reservation.branch
        branch.add(sampled.tokens, Role.ASSISTANT, calls, sampled.logprobs, sampled.versions, sampled.finish_reason)
        if request.grammar is not None:
            branch.mark_grammar(request.grammar, sampled.grammar_mass)
        branch.note_experts(sampled.routing)
        branch.reserved = 0
        self.truncated = self.truncated and not reservation.after_refusal
        messages = (*request.messages, answer)
        self.completions.append(Prefix(branch, branch.turns[-1], messages, request.tools, shown))

    def score(self, score: float) -> None:
        """Record the score that a simulated user, an environment or tools gave to the last completion. The completion
        must be at the end of its branch."""
        turns = self.completions[-1].branch.turns
        turns[-1] = turns[-1]._replace(score=score)

    def score_all(self, scores: Sequence[float | None]) -> None:
        """Record the scores that an agent gave to the completions. The scores have the order in which the completions
        were recorded; None: no score.

        Raises RefusedError: the numbers of scores and completions differ.
        """
        if len(scores) != len(self.completions):
            raise RefusedError(
                f"there are {len(scores)} rewards of turns for {len(self.completions)} completions; give one for each, "
                "or null"
            )
        for completion, score in zip(self.completions, scores, strict=True):
            turns = completion.branch.turns
            at = next(index for index, turn in enumerate(turns) if turn.start == completion.turn.start)
            turns[at] = turns[at]._replace(score=score)

    def cancel(self, reservation: Reservation) -> str | None:
        """Undo a reservation. If this removes the branch, return the name of the branch's session, else None."""
        branch = reservation.branch
        if reservation.start:
            branch.turns, branch.reserved = branch.turns_within(reservation.start), 0
            return None
        self.branches.remove(branch)
        return branch.session

    def last_completions(self) -> list[Prefix]:
        """The last completion of each branch that has a completion, oldest first."""
        last = {completion.branch: completion for completion in self.completions}
        return [completion for completion in self.completions if completion is last[completion.branch]]

    def trajectory(self, rewards: Mapping[str, float], timings: Mapping[str, float], split: Split) -> Trajectory:
        """Concatenate the branches, each up to its last completion, in the order of these completions.

        `split`: see `split_steps`. Raises InvariantError: there is no completion, or the engine's log-probs or versions
        are invalid.
        """
        ends = self.last_completions()
        if not ends:
            raise InvariantError(f"{self._ticket.id}: the episode ended before any request for a completion")
        columns = (each.branch.columns(each.turn.end) for each in ends)
        tokens, logprobs, versions, mass = map(np.concatenate, zip(*columns, strict=True))
        turns: list[Turn] = []
        for each in ends:
            start = turns[-1].end if turns else 0
            within = each.branch.turns_within(each.turn.end)
            turns += [turn._replace(start=start + turn.start, end=start + turn.end) for turn in within]
        completed = turns[-1].finish_reason == "stop" and not self.truncated
        played = Finish.COMPLETED if completed else Finish.TRUNCATED
        ticket, (image_spans, image_digests) = self._ticket, image_arrays(self.images())
        return Trajectory(
            id=ticket.id,
            task_id=ticket.task.id,
            group_id=ticket.group_id,
            member=ticket.member,
            tokens=tokens,
            logprobs=logprobs,
            version_runs=runs_of(versions),
            turns=tuple(turns),
            steps=split_steps(split, tokens, turns, self._chat.piece),
            finish=Finish.DEMONSTRATION if ticket.task.demonstration else played,
            rewards=rewards,
            timings=timings,
            grammar_mass=mass if any(turn.grammar for turn in turns) else NO_MASS,
            routed_experts=routed_experts([(each.branch.experts(each.turn.end), each.turn.end) for each in ends]),
            image_spans=image_spans,
            image_digests=image_digests,
        )

    def images(self) -> list[PlacedImage]:
        """The images of the trajectory, in the order of its tokens."""
        found: list[PlacedImage] = []
        start = 0
        for each in self.last_completions():
            found += [moved(image, start) for image in each.images]
            start += each.turn.end
        return found

    def _continuation(self, request: CompletionRequest) -> tuple[Prefix | None, GivenTokens]:
        """The prefix that the request continues (None if it continues none), and the tokens that the request adds."""
        if request.tokens is not None:
            return self._continued(request.tokens)
        if prefix := self._repeated(request):
            following = request.messages[len(prefix.messages) :]
            added = self._chat.suffix(following, request.tools, int(prefix.tokens[-1]))
            if self._keeps(prefix, added, request):
                return prefix, self._images.placed(added, following)
        given = self._images.placed(self._chat.prompt(request.messages, request.tools), request.messages)
        return None, given if self.completions else self._within_limit(given)

    def _repeated(self, request: CompletionRequest) -> Prefix | None:
        """The newest completion that the request repeats, together with everything before the completion. After the
        completion, the request has only messages that the policy did not write. Of several candidates for the same
        turn, the one whose thoughts the request repeats is returned."""
        found: list[Prefix] = []
        for prefix in reversed(self.completions):
            if found and len(prefix.messages) != len(found[0].messages):
                continue
            following = request.messages[len(prefix.messages) :]
            is_context = following and all(message["role"] != "assistant" for message in following)
            if is_context and same_value(request.tools, prefix.tools) and prefix.repeated_by(request.messages):
                found.append(prefix)
        return max(found, key=lambda each: same_thoughts(request.messages, each.messages), default=None)

    def _continued(self, tokens: NDArray[np.int32]) -> tuple[Prefix | None, GivenTokens]:
        """The longest recorded prefix with which `tokens` begin, and the tokens after it. If several branches have this
        prefix, one that ends with it and has no request in flight is preferred.

        Raises RefusedError: the tokens have a placeholder of an image or a video.
        """
        if self._images.forged(tokens, ()):
            raise RefusedError("tokens cannot show an image or a video, but they have a placeholder of one")
        fitting = [each for each in self.completions if each.begins(tokens)]
        if not fitting:
            return None, GivenTokens(tokens)
        prefix = max(fitting, key=lambda each: (each.turn.end, each.is_last and not each.branch.reserved))
        return prefix, GivenTokens(tokens[prefix.turn.end :])

    def _within_limit(self, given: GivenTokens) -> GivenTokens:
        """Cut the first prompt to its limit. A prompt with images is never cut. Raises LimitError: the prompt is too
        long, and may not be cut."""
        tokens = self._limits.fitting_prompt(given.tokens, may_cut=not given.images)
        return given if tokens is given.tokens else GivenTokens(tokens)

    def _keeps(self, prefix: Prefix, added: NDArray[np.int32], request: CompletionRequest) -> bool:
        """True if the request may continue the tokens of `prefix` with `added`."""
        ended = prefix.turn.finish_reason == "stop"
        if ended and not self._as_rendered:
            return True
        try:
            known = collapsed(prefix.tokens, prefix.images)
            return self._chat.renders(np.concatenate([known, added]), request.messages, request.tools)
        except RefusedError:
            return ended

    def _check_images(self, added: Sequence[PlacedImage]) -> None:
        """Raises LimitError: with the images `added`, the episode would show more images than a trajectory may have."""
        shown = len(added) + sum(len(branch.images_within(len(branch))) for branch in self.branches)
        if added and shown > MAX_IMAGES:
            self.truncated = True
            reason = f"the branches of the episode would show {shown} images; they may show {MAX_IMAGES} together"
            raise LimitError("image_limit", reason)

    def _room(self, seen: int, new: int, in_flight: Sequence[Branch]) -> int:
        """The number of tokens that a completion after `seen` tokens may have.

        Of the `seen` tokens, `new` are not yet part of the episode. The room that the branches `in_flight` have
        reserved is subtracted.
        """
        taken = sum(map(len, self.branches)) + sum(branch.reserved for branch in in_flight) + new
        return self._limits.room(self.turns_left - len(in_flight), seen, taken)
