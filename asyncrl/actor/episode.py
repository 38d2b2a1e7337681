"""The state machine of one episode, and its one token sequence. Nothing here waits or talks to anybody.

    PENDING ─start─► GENERATING ─generated─► TOOL_CALLING ─answered─► GENERATING ...
    GENERATING ─► COMPLETED   the turn ended with a stop token and calls no tool
    GENERATING ─► TRUNCATED   the turn was cut, or the last allowed turn still calls tools
    TOOL_CALLING ─► TRUNCATED no room is left behind the results, which are then left out
    GENERATING ─► ABORTED     the engine aborted the generation
    any but the last two ─► FAILED

Only COMPLETED and TRUNCATED episodes have a trajectory; to end as ABORTED or FAILED raises EpisodeFailed. Nothing is
appended after a cut turn: an end mark that the policy did not write would be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.parsing import MalformedCall
from asyncrl.errors import AsyncrlError, InvariantError
from asyncrl.types import NO_VERSION, Finish, Role, Step, Ticket, ToolCall, Trajectory, Turn, runs_of


class State(StrEnum):
    PENDING = "pending"
    GENERATING = "generating"
    TOOL_CALLING = "tool_calling"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_FINISHES = {State.COMPLETED: Finish.COMPLETED, State.TRUNCATED: Finish.TRUNCATED}


class EpisodeFailed(AsyncrlError):  # noqa: N818 - named after the state
    """An episode ended as FAILED or ABORTED: it has no trajectory, and its ticket goes back with the reason."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state = state


@dataclass(frozen=True, slots=True)
class Limits:
    """Assistant turns of an episode, tokens of one such turn, and tokens of the whole episode, prompt included."""

    max_turns: int
    max_turn_tokens: int
    max_tokens: int


class Episode:
    """One episode. A method that the state does not allow raises InvariantError."""

    def __init__(self, limits: Limits) -> None:
        self.state = State.PENDING
        self.turns: list[Turn] = []
        self._limits = limits
        self._length = 0
        self._tokens = np.empty(limits.max_tokens, np.int32)
        self._logprobs = np.empty(limits.max_tokens, np.float32)
        self._versions = np.empty(limits.max_tokens, np.int32)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens so far, int32[T]: a view, to which later tokens are added behind its end."""
        return self._tokens[: self._length]

    @property
    def room(self) -> int:
        """Tokens that the next assistant turn may have."""
        return min(self._limits.max_turn_tokens, self._limits.max_tokens - self._length)

    def start(self, prompt: NDArray[np.int32]) -> None:
        """PENDING to GENERATING; FAILED where the prompt leaves no room."""
        self._expect(State.PENDING)
        if len(prompt) >= self._limits.max_tokens:
            self.fail(f"the prompt has {len(prompt)} tokens, actor.max_tokens is {self._limits.max_tokens}: raise it")
        self._append_context(prompt, Role.PROMPT)
        self.state = State.GENERATING

    def generated(self, generation: Generation, calls: Sequence[ToolCall | MalformedCall]) -> State:
        """Take what the engine sampled, and the calls in it. Returns the state that it leads to."""
        self._expect(State.GENERATING)
        if generation.finish_reason == "abort":
            self._end(State.ABORTED, "the engine aborted the generation")
        count = len(generation.tokens)
        if not 0 < count <= self.room or generation.finish_reason not in ("stop", "length"):
            self.fail(f"the engine gave {count} tokens of at most {self.room}, finish {generation.finish_reason!r}")
        self._append_turn(generation, [call for call in calls if isinstance(call, ToolCall)])
        if generation.finish_reason == "length":
            self.state = State.TRUNCATED
        elif not calls:
            self.state = State.COMPLETED
        else:
            self.state = State.TRUNCATED if self._assistant_turns() == self._limits.max_turns else State.TOOL_CALLING
        return self.state

    def answered(self, suffix: NDArray[np.int32]) -> None:
        """Take the suffix that holds the results: back to GENERATING, or TRUNCATED where no room is left behind it."""
        self._expect(State.TOOL_CALLING)
        if self._length + len(suffix) >= self._limits.max_tokens:
            self.state = State.TRUNCATED
            return
        self._append_context(suffix, Role.TOOL)
        self.state = State.GENERATING

    def fail(self, reason: str) -> NoReturn:
        """FAILED: raises EpisodeFailed. A finished episode fails as well where its rewards cannot be had."""
        self._end(State.FAILED, reason)

    def trajectory(
        self, ticket: Ticket, steps: Sequence[Step], rewards: Mapping[str, float], timings: Mapping[str, float]
    ) -> Trajectory:
        """The finished episode. Raises InvariantError: it has none, or the engine's log-probs or versions are bad."""
        self._expect(*_FINISHES)
        return Trajectory(
            id=ticket.id,
            task_id=ticket.task.id,
            group_id=ticket.group_id,
            member=ticket.member,
            tokens=self.tokens.copy(),
            logprobs=self._logprobs[: self._length].copy(),
            version_runs=runs_of(self._versions[: self._length]),
            turns=tuple(self.turns),
            steps=tuple(steps),
            finish=_FINISHES[self.state],
            rewards=rewards,
            timings=timings,
        )

    def _end(self, state: State, reason: str) -> NoReturn:
        self._expect(*(set(State) - {State.ABORTED, State.FAILED}))
        self.state = state
        raise EpisodeFailed(state, reason)

    def _assistant_turns(self) -> int:
        return sum(turn.role is Role.ASSISTANT for turn in self.turns)

    def _append_context(self, tokens: NDArray[np.int32], role: Role) -> None:
        span = self._grow(len(tokens))
        self._tokens[span], self._logprobs[span], self._versions[span] = tokens, 0.0, NO_VERSION
        self.turns.append(Turn(span.start, span.stop, role))

    def _append_turn(self, generation: Generation, calls: Sequence[ToolCall]) -> None:
        span = self._grow(len(generation.tokens))
        self._tokens[span] = generation.tokens
        self._logprobs[span], self._versions[span] = generation.logprobs, generation.versions
        self.turns.append(Turn(span.start, span.stop, Role.ASSISTANT, generation.finish_reason, tuple(calls)))

    def _grow(self, count: int) -> slice:
        start, self._length = self._length, self._length + count
        return slice(start, self._length)

    def _expect(self, *states: State) -> None:
        if self.state not in states:
            raise InvariantError(f"the episode is {self.state}; this needs {' or '.join(states)}")
