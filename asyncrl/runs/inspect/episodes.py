"""Lists the episodes and steps of a run as flat rows for tables, sorted and filtered."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from statistics import fmean
from typing import Self

from asyncrl.errors import RefusedError
from asyncrl.ids import evaluation_prefix
from asyncrl.observe.shown_text import shown_text
from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord, TrajectoryState
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.decoding import Decode
from asyncrl.types import BatchPlan, Finish, Role, Trajectory

SORT_KEYS = {
    **{name: name for name in ("reward", "outcome", "lag", "tokens", "turns")},
    "time": "seconds",
}


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """An episode.

    - `reason`: why it is evicted, filtered, dropped or dead;
    - `step`: the newest learner step that trains it;
    - `lag`: the lag of its oldest trained token at that step, or of its oldest token at its eviction;
    - `tokens`, `sampled`: the numbers of all its tokens, and of the tokens that the policy sampled;
    - `masked`: the number of its sampled tokens that its step does not train, since they are too old;
    - `turns`: the number of the policy's turns;
    - `seconds`: its duration.

    An unknown value is `None`. A failed attempt has only the fields without a default.
    """

    id: str
    group_id: str
    member: int
    state: str
    reason: str
    step: int | None = None
    lag: int | None = None
    reward: float | None = None
    outcome: float | None = None
    tokens: int | None = None
    sampled: int | None = None
    masked: int | None = None
    turns: int | None = None
    finish: str = ""
    seconds: float | None = None
    data_source: str = ""

    @classmethod
    def of(cls, name: str, facts: TrajectoryRecord) -> Self:
        """The row of a trajectory."""
        return cls(
            name,
            facts.group,
            facts.member,
            facts.state.value,
            facts.reason,
            facts.last_plan if facts.plans else None,
            facts.lag if facts.lag >= 0 else None,
            facts.reward if facts.scored else None,
            facts.outcome if facts.scored else None,
            facts.tokens,
            facts.sampled,
            facts.masked,
            facts.turns,
            facts.finish,
            facts.seconds,
            facts.data_source,
        )

    @classmethod
    def failed(cls, name: str, letter: DeadLetter) -> Self:
        """The row of an attempt that has no trajectory."""
        return cls(name, letter.group, letter.member, TrajectoryState.DEAD.value, letter.reason)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A learner step. Means are over its episodes.

    - `version`: the learner's policy version at the step;
    - `tokens`, `sampled`: the numbers of all tokens, and of the tokens that the policy sampled;
    - `masked`: the number of sampled tokens that the step does not train, since they are too old;
    - `lag_mean`, `lag_max`: the mean and the largest lag of its episodes. A lag is the number of versions between
      `version` and an episode's oldest trained token;
    - `truncated`: the number of episodes that were cut off;
    - `skipped`: why the step trains nothing; empty if it trains.
    """

    step: int
    version: int
    episodes: int
    groups: int
    tokens: int
    sampled: int
    masked: int
    reward_mean: float
    reward_min: float
    reward_max: float
    outcome_mean: float
    lag_mean: float
    lag_max: int
    turns_mean: float
    seconds_mean: float
    truncated: int
    skipped: str


def step_row(stored: StoredRun, plan: BatchPlan) -> StepRow:
    """Summarise the episodes of a plan."""
    facts = stored.facts(plan.ids)
    rewards = [each.reward for each in facts]
    lags = [lag for each in facts if (lag := each.trained_lag_at(plan.version)) >= 0]
    return StepRow(
        step=plan.step,
        version=plan.version,
        episodes=len(facts),
        groups=len(set(plan.group_ids)),
        tokens=sum(plan.tokens),
        sampled=sum(plan.sampled),
        masked=sum(plan.sampled) - sum(plan.trained_tokens),
        reward_mean=fmean(rewards),
        reward_min=min(rewards),
        reward_max=max(rewards),
        outcome_mean=fmean(each.outcome for each in facts),
        lag_mean=fmean(lags),
        lag_max=max(lags),
        turns_mean=fmean(each.turns for each in facts),
        seconds_mean=fmean(each.seconds for each in facts),
        truncated=sum(each.finish == Finish.TRUNCATED for each in facts),
        skipped=plan.skipped,
    )


def required_plan(stored: StoredRun, step: int) -> BatchPlan:
    """The plan of a step. Raises RefusedError: the step has none."""
    plan = stored.plan(step) if step >= 0 else None
    if plan is None:
        steps = stored.steps()
        known = f"steps 0 to {steps - 1} have one" if steps else "the run has no batch yet"
        raise RefusedError(f"step {step} has no recorded batch; {known}")
    return plan


def list_episodes(
    stored: StoredRun,
    *,
    step: int | None = None,
    evaluation: int | None = None,
    states: Collection[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    limit: int | None = None,
) -> list[EpisodeRow]:
    """List at most `limit` episodes. With `states`, list only episodes in one of these states. With `step` or
    `evaluation`, list only the episodes of that step or evaluation.

    `sort` is a key of `SORT_KEYS`: the largest values come first. Without `sort` the newest ids come first. `reverse`
    reverses the order, but episodes without a value always come last. Without `sort` and `step`, this reads all dead
    letters, but only as many trajectories as it needs. Raises RefusedError: the step has no plan.
    """
    if step is not None:
        plan = required_plan(stored, step)
        found = map(EpisodeRow.of, plan.ids, stored.facts(plan.ids))
        rows: Iterable[EpisodeRow] = sorted(found, key=attrgetter("id"), reverse=not reverse)
    else:
        rows = _every_row(stored, "" if evaluation is None else evaluation_prefix(evaluation), reverse)
    if states:
        rows = (row for row in rows if row.state in states)
    if sort is None:
        return list(islice(rows, limit))
    if limit is None:
        rows = list(rows)
        limit = len(rows)
    value = attrgetter(SORT_KEYS[sort])
    sign = -1 if reverse else 1
    return heapq.nlargest(limit, rows, key=_sortable(value, sign))


def _sortable(value: Callable[[EpisodeRow], float | None], sign: int) -> Callable[[EpisodeRow], tuple[bool, float]]:
    def key(row: EpisodeRow) -> tuple[bool, float]:
        found = value(row)
        return (False, 0.0) if found is None else (True, sign * found)

    return key


def _every_row(stored: StoredRun, prefix: str, ascending: bool) -> Iterator[EpisodeRow]:
    kept = (EpisodeRow.of(name, facts) for name, facts in stored.records(prefix, backwards=not ascending))
    letters = [(name, letter) for name, letter in stored.dead_letters() if name.startswith(prefix)]
    failed = (
        EpisodeRow.failed(name, letter)
        for name, letter in (letters if ascending else reversed(letters))
        if not (letter.scoring or stored.is_recorded(name))
    )
    return heapq.merge(kept, failed, key=attrgetter("id"), reverse=not ascending)


def prompt(trajectory: Trajectory, decode: Decode) -> str:
    """The text of the first turn."""
    turn = trajectory.turns[0]
    return shown_text(trajectory, turn.start, turn.end, decode)


def answer(trajectory: Trajectory, decode: Decode) -> str:
    """Decode the tokens that the policy sampled in its last turn."""
    own: Sequence[tuple[int, int]] = [
        (turn.start, turn.end) for turn in trajectory.turns if turn.role is Role.ASSISTANT
    ]
    start, end = own[-1] if own else (0, 0)
    return decode(trajectory.tokens[start:end].tolist())
