"""One token sequence of an episode that may have several, as it grows; and the trajectory that they are together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.chat import Chat
from asyncrl.actor.engine.base import Generation
from asyncrl.actor.steps import Split, split_steps
from asyncrl.types import NO_VERSION, Finish, Role, Ticket, ToolCall, Trajectory, Turn, runs_of


@dataclass(eq=False)
class Branch:
    """tokens int32[T], logprobs float32[T] and versions int32[T] as in a Trajectory. `name` is the engine's session;
    `reserved` tokens may come with the answer that is under way."""

    name: str
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    turns: list[Turn] = field(default_factory=list)
    reserved: int = 0

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.tokens), np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.end] = turn.role is Role.ASSISTANT
        return mask

    def add_context(self, tokens: NDArray[np.int32], role: Role, calls: Sequence[ToolCall] = ()) -> None:
        """Add what was not sampled here; `calls` of tools are those in it that the policy made earlier."""
        none = np.zeros(len(tokens), np.float32), np.full(len(tokens), NO_VERSION, np.int32)
        self._add(tokens, *none, [Turn(0, len(tokens), role, tool_calls=tuple(calls))])

    def add_answer(self, generation: Generation, calls: Sequence[ToolCall]) -> None:
        turn = Turn(0, len(generation.tokens), Role.ASSISTANT, generation.finish_reason, tuple(calls))
        self._add(generation.tokens, generation.logprobs, generation.versions, [turn])
        self.reserved = 0

    def cut(self, length: int) -> None:
        """Take back what stands behind the first `length` tokens, and what was reserved."""
        self.tokens, self.logprobs, self.versions = self.tokens[:length], self.logprobs[:length], self.versions[:length]
        self.turns = self.turns_until(length)
        self.reserved = 0

    def turns_until(self, length: int) -> list[Turn]:
        """The turns in the first `length` tokens."""
        return [turn for turn in self.turns if turn.end <= length]

    def add_answered(self, other: Branch) -> None:
        """Add `other` up to its last answer."""
        end = max(turn.end for turn in other.turns if turn.role is Role.ASSISTANT)
        self._add(other.tokens[:end], other.logprobs[:end], other.versions[:end], other.turns_until(end))

    def _add(
        self,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        turns: Sequence[Turn],
    ) -> None:
        before = len(self.tokens)
        self.turns += [turn._replace(start=before + turn.start, end=before + turn.end) for turn in turns]
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.versions = np.concatenate([self.versions, versions])


def joined(branches: Sequence[Branch]) -> Branch:
    """The branches one behind the other, each up to its last answer."""
    whole = Branch("")
    for branch in branches:
        whole.add_answered(branch)
    return whole


def trajectory_of(
    ticket: Ticket,
    branches: Sequence[Branch],
    truncated: bool,
    chat: Chat,
    rewards: Mapping[str, float],
    timings: Mapping[str, float],
    step_split: Split,
) -> Trajectory:
    """The branches as one trajectory; `truncated` says that a limit refused what would have followed.

    Raises InvariantError: the engine's log-probs or versions are bad.
    """
    whole = joined(branches)
    completed = whole.turns[-1].finish_reason == "stop" and not truncated
    return Trajectory(
        id=ticket.id,
        task_id=ticket.task.id,
        group_id=ticket.group_id,
        member=ticket.member,
        tokens=whole.tokens,
        logprobs=whole.logprobs,
        version_runs=runs_of(whole.versions),
        turns=tuple(whole.turns),
        steps=split_steps(step_split, whole.tokens, whole.turns, chat.piece),
        finish=Finish.COMPLETED if completed else Finish.TRUNCATED,
        rewards={name: float(value) for name, value in rewards.items()},
        timings=timings,
    )
