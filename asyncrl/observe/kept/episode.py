"""A kept episode: its trajectory, its labels, its values in training, and a row of facts for tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import InvariantError
from asyncrl.types import Finish, Labels, Role, Task, Trajectory

BEST, WORST, RANDOM = "best", "worst", "random"
"""Flags that say why an episode is in the sample. An episode with none of them was kept with the rest of its group."""
TRUNCATED, GRAMMAR, DEMONSTRATION = "truncated", "grammar", "demonstration"
"""Flags of episodes that were cut off at a limit, that have a turn sampled under a grammar, or that are demonstrations.
"""
HELD_OUT = "held_out"
"""The flag of episodes of an evaluation, which are never trained."""
PENALTIES = ("overlong", "incorrect_answer")
"""Parts of the reward. An episode in which such a part is not 0 has the name of the part as a flag."""
ARRAYS = ("advantages", "importance_weights", "proximal_logprobs")


class KeptRow(msgspec.Struct, frozen=True, gc=False):
    """Facts about a kept episode.

    - `step`: the learner step that trained it. For a held-out episode, the number of learner steps before its
      evaluation;
    - `version`: the policy version that was trained or evaluated then;
    - `lag`: the number of versions between its oldest token that is not masked and `version`; -1 if all are masked,
      and for a demonstration;
    - `source`: the task's data source;
    - `tokens`, `sampled`: the numbers of all its tokens, and of the tokens that the policy sampled;
    - `turns`: the number of the policy's turns;
    - `tool_calls`: the number of the policy's calls of tools;
    - `tools`: the names of the called tools, in alphabetical order;
    - `flags`: some of the constants above;
    - `masked`: the number of its sampled tokens that its step did not train, since they were too old.
    """

    step: int
    id: str
    group_id: str
    member: int
    task_id: str
    source: str
    reward: float
    outcome: float
    sampled: int
    tokens: int
    turns: int
    branches: int
    tools: tuple[str, ...]
    tool_calls: int
    finish: str
    lag: int
    version: int
    flags: tuple[str, ...]
    masked: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptEpisode:
    """An episode as a learner step trained it.

    `advantages`, `importance_weights` and `proximal_logprobs` are float32[T], 0 on tokens that the policy did not
    sample. An importance weight is the weight that a token had in the loss of the first update that used it. It is 1
    without corrections, and `algorithm.demonstration.weight` in a demonstration. It is 0 for a token that was too old,
    or that a correction or a grammar dropped. All three arrays are 0 in held-out episodes. `task` is `None` if the
    run's data does not have the task.

    Raises InvariantError: an array has another shape or dtype.
    """

    row: KeptRow
    trajectory: Trajectory
    labels: Labels
    task: Task | None
    advantages: NDArray[np.float32]
    importance_weights: NDArray[np.float32]
    proximal_logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in ARRAYS:
            array: NDArray[np.float32] = getattr(self, name)
            if array.dtype != np.float32 or array.shape != (len(self.trajectory),):
                raise InvariantError(
                    f"{self.row.id}: {name} is {array.dtype}{list(array.shape)}; it must be "
                    f"float32[{len(self.trajectory)}]"
                )

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays that have a value for each token."""
        played = (self.trajectory.tokens, self.trajectory.logprobs, self.trajectory.grammar_mass)
        return sum(each.nbytes for each in (*played, *(getattr(self, name) for name in ARRAYS)))


@dataclass(frozen=True, slots=True, eq=False)
class KeptStep:
    """The sample of one learner step: one or more whole groups. The members of a group are consecutive."""

    step: int
    episodes: Sequence[KeptEpisode]


def row_of(
    step: int,
    version: int,
    trajectory: Trajectory,
    labels: Labels,
    task: Task | None,
    why: Iterable[str],
    masked: int = 0,
) -> KeptRow:
    """The row of an episode that `step` trains under `version`. The step does not train the `masked` oldest of its
    sampled tokens. `why` are the flags that put it into the sample."""
    # Only the assistant's turns count: the prompt of a branch repeats calls from other branches.
    played = [turn for turn in trajectory.turns if turn.role is Role.ASSISTANT]
    calls = [call.name for turn in played for call in turn.tool_calls]
    return KeptRow(
        step=step,
        id=trajectory.id,
        group_id=trajectory.group_id,
        member=trajectory.member,
        task_id=trajectory.task_id,
        # The id of a task begins with its source; its split and its index follow.
        source=task.data_source if task else trajectory.task_id.rsplit("/", 2)[0],
        reward=labels.reward,
        outcome=labels.outcome,
        sampled=trajectory.sampled_tokens,
        tokens=len(trajectory),
        turns=len(played),
        branches=len(trajectory.branches),
        tools=tuple(sorted(set(calls))),
        tool_calls=len(calls),
        finish=trajectory.finish.value,
        lag=_lag(version, trajectory, masked),
        version=version,
        flags=(*why, *_flags(trajectory, labels.extra)),
        masked=masked,
    )


def _lag(version: int, trajectory: Trajectory, masked: int) -> int:
    if trajectory.is_demonstration or masked == trajectory.sampled_tokens:
        return -1
    # In a trajectory with branches, newer tokens may come before older ones.
    return version - int(np.sort(trajectory.versions[trajectory.loss_mask])[masked])


def _flags(trajectory: Trajectory, extra: Mapping[str, float]) -> list[str]:
    found = {
        TRUNCATED: trajectory.finish is Finish.TRUNCATED,
        DEMONSTRATION: trajectory.is_demonstration,
        GRAMMAR: any(turn.grammar for turn in trajectory.turns),
        **{name: extra.get(name, 0.0) != 0 for name in PENALTIES},
    }
    return [name for name, holds in found.items() if holds]
