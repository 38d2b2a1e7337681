"""Notices that the filters refuse every group, and ends a run in which this goes on.

The learner then waits forever for a batch, although no episode fails. If the filters refuse every group because the
policy solves the tasks, the end counts as a result, otherwise as a failure. The count begins at 0 with each accepted
group and with each start of the replay, so that a run may resume after its filters were changed.

A mean outcome of 1 counts as right. If an outcome of the run was above 1, then 1 is not the best outcome, and the best
outcome is unknown. Such a run never ends as solved.

Groups whose members all failed alike may be normal for a task that is seldom solved: with one success in a thousand
episodes, 125 groups of eight pass between two groups with different rewards. Such a group therefore counts by its
members: EPISODES of them count as one group. The default limit of 256 groups then allows 10,240 episodes. The
probability that none of them is such a success is 0.004%.

A group counts as one whole group if it is right, or if its members did not fail alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from asyncrl.errors import TasksSolvedError, TooManyFailuresError

BATCHES, FEWEST = 2, 8
"""The filters block a run once they have refused as many groups in a row as BATCHES batches have, and at least FEWEST
groups."""
RIGHT, SOLVED = 0.999, 0.95
"""A group whose mean outcome is at least RIGHT is right. The tasks are solved if at least the share SOLVED of the
groups is right and was refused for a reason in OF_SOLVED."""
ABOVE_1 = "outcome_above_1"
"""The key in the table `meta` that is true once an outcome of the run was above 1."""
EPISODES = 40
"""This many members of groups that failed alike count as one refused group."""
OF_SOLVED = {"zero_variance", "reward_high"}
"""The reasons for which filters refuse groups whose tasks are solved."""
REASONS = {
    "zero_variance": "all scores in the group were equal",
    "reward_low": "the mean reward was below replay.filter.min_reward",
    "reward_high": "the mean reward was above replay.filter.max_reward",
    "too_long": "a member had more tokens than replay.filter.max_tokens",
}
ADVICE = {
    "zero_variance": "use tasks that the policy solves sometimes, demonstrations first (`asyncrl sft`), a larger "
    "learner.group_size, or a reward with more levels",
    "reward_low": "use easier tasks, or a lower replay.filter.min_reward",
    "reward_high": "use harder tasks, or a higher replay.filter.max_reward",
    "too_long": "raise replay.filter.max_tokens, or lower actor.max_tokens (actor.max_total_tokens, if an "
    "episode may have several sequences)",
}


class FilterLimit:
    """Counts the groups that filters have refused since the last accepted one. A batch has `batch_groups` groups. After
    `limit` refused groups the run must end; `None`: never."""

    def __init__(self, batch_groups: int, limit: int | None) -> None:
        self._held_after = max(FEWEST, BATCHES * batch_groups)
        self._limit = limit
        self._reasons: Counter[str] = Counter()
        self._outcome = self._right = 0.0
        self._counted = 0
        self._has_accepted = self._above_1 = False

    def resume(self, has_planned: bool, above_1: bool) -> None:
        """Note if earlier processes of the run have planned a batch, and so have accepted groups, and if an outcome was
        above 1."""
        self._has_accepted |= has_planned
        self._above_1 |= above_1

    def exceeded(self) -> None:
        """Note that an outcome was above 1."""
        self._above_1 = True

    def accepted(self) -> None:
        """Note that the filters accepted a group."""
        self._has_accepted = True
        self._reasons.clear()
        self._outcome = self._right = 0.0
        self._counted = 0

    def refused(self, reason: str, outcomes: Sequence[float]) -> None:
        """Note that the filters refused a group for this reason. `outcomes` are those of the episodes that the policy
        played."""
        self._reasons[reason] += 1
        mean = fmean(outcomes)
        self._outcome += mean
        self._right += mean >= RIGHT and reason in OF_SOLVED
        failed_alike = reason == "zero_variance" or (reason == "reward_low" and max(outcomes) == min(outcomes))
        self._counted += min(len(outcomes), EPISODES) if failed_alike and mean < RIGHT else EPISODES

    @property
    def count(self) -> int:
        """The number of groups refused in a row."""
        return self._reasons.total()

    @property
    def is_solved(self) -> bool:
        """True if the filters refuse groups because the policy has learned to solve the tasks. False if no group was
        accepted before: then the policy may have solved the tasks from the start. False if an outcome was above 1."""
        return self._has_accepted and self._are_right and not self._above_1

    @property
    def _are_right(self) -> bool:
        return self._right >= SOLVED * self.count

    def text(self) -> str:
        """A sentence that names the filters as the cause of the learner's wait. Empty while the filters do not block
        the run."""
        if self.count < self._held_after:
            return ""
        refused = f"replay.filter refused the last {self.count} groups, so that nothing can be trained"
        right = f"{self._right / self.count:.0%} of the groups were right in every member"
        if self.is_solved:
            result = "This is a success, not a fault; harder tasks would teach more"
            return f"{refused}: the policy solves these tasks, since {right}. {result}"
        if self._are_right and self._above_1:
            return (
                f"{refused}: {self._right / self.count:.0%} of the groups had a mean outcome of at least 1. The policy "
                "may solve the tasks, or give only answers of one value, since this run had outcomes above 1: use "
                "harder tasks, or a rule with outcomes from 0 to 1"
            )
        if self._are_right:
            return (
                f"{refused}: {right}, and the filters accepted none before. The policy can solve the tasks already, or "
                "the scoring rule calls every answer right: try the rule with a wrong answer, or use harder tasks"
            )
        (reason, most), *_ = self._reasons.most_common(1)
        where = "" if most == self.count else f" in {most} of them"
        mean = f"the mean outcome was {self._outcome / self.count:.3g}"
        return f"{refused}: {REASONS[reason]}{where} ({reason}), and {mean}. To go on: {ADVICE[reason]}"

    def check(self) -> None:
        """Raises TasksSolvedError or TooManyFailuresError: the filters have refused so many groups in a row that the
        run must end. It is TasksSolvedError if the policy has learned to solve the tasks."""
        if self._limit is None or self.count < self._held_after or self._counted < self._limit * EPISODES:
            return
        end = f"{self.text()}. The run ends after {self.count} refused groups (replay.filter.max_refused={self._limit}"
        if self.is_solved:
            raise TasksSolvedError(f"{end})")
        if self._counted < self.count * EPISODES:
            end += f", where {EPISODES} episodes of groups that failed alike count as one group"
        raise TooManyFailuresError(f"{end}). Change what is needed, then run the same command again")
