"""What an evaluation measured: pass@k, outcomes, rewards and failures, for each data source and in all.

An attempt is right if its outcome is at least a threshold. Of a task with n scored attempts, c of them right, pass@k is
1 - C(n-c, k) / C(n, k): the unbiased estimate of the chance that one of k attempts is right. A failed attempt has no
outcome and counts nowhere but as failed. A task with fewer than k scored attempts has no part in pass@k.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from rich.console import Group
from rich.table import Table
from rich.text import Text

from asyncrl.ids import held_out_row, is_evaluation
from asyncrl.replay.records import DeadLetter, TrajectoryRecord, TrajectoryState
from asyncrl.replay.stored import StoredRun
from asyncrl.text import cut

REASON_CHARS = 160
SHOWN_REASONS = 10
UNKNOWN = "the reason was not kept (replay.max_dead_letters)"


@dataclass(frozen=True, slots=True)
class EvaluatedSource:
    """The result on the tasks of one data source, or on all. Means are None without a scored attempt. `pass_at` is by
    k, and None where no task has k scored attempts; `pass_tasks` says how many tasks each k rests on."""

    tasks: int
    scored: int
    failed: int
    mean_outcome: float | None
    mean_reward: float | None
    pass_at: Mapping[int, float | None]
    pass_tasks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of a complete evaluation of `attempts` a task: on all tasks, by data source, and the failed attempts
    by reason."""

    attempts: int
    threshold: float
    total: EvaluatedSource
    sources: Mapping[str, EvaluatedSource]
    failures: Mapping[str, int]


def pass_at(k: int, right: int, scored: int) -> float:
    """The unbiased estimate of pass@k for a task of which `right` of `scored` attempts are right; `scored` is at least
    k."""
    return 1 - comb(scored - right, k) / comb(scored, k)


def ks(attempts: int) -> list[int]:
    """1, 2, 4 and so on, and the number of attempts."""
    return sorted({1 << power for power in range(attempts.bit_length())} | {attempts})


def read_result(stored: StoredRun, sources: Sequence[str], attempts: int, threshold: float) -> EvaluationResult:
    """The result of a complete evaluation from its store. `sources` has the data source of each held-out task."""
    scored: dict[int, list[TrajectoryRecord]] = defaultdict(list)
    for record in _evaluated(stored):
        scored[held_out_row(record.group)].append(record)
    by_source: dict[str, list[Sequence[TrajectoryRecord]]] = defaultdict(list)
    for row, source in enumerate(sources):
        by_source[source].append(scored[row])
    return EvaluationResult(
        attempts,
        threshold,
        _summarise([scored[row] for row in range(len(sources))], attempts, threshold),
        {name: _summarise(tasks, attempts, threshold) for name, tasks in sorted(by_source.items())},
        _reasons(stored, len(sources) * attempts - sum(map(len, scored.values()))),
    )


def _evaluated(stored: StoredRun) -> Iterable[TrajectoryRecord]:
    for shard in stored.each(TrajectoryRecord.all):
        yield from (record for _, record in shard if record.state is TrajectoryState.EVALUATED)


def _summarise(tasks: Sequence[Sequence[TrajectoryRecord]], attempts: int, threshold: float) -> EvaluatedSource:
    episodes = [record for task in tasks for record in task]
    counts = [(sum(record.outcome >= threshold for record in task), len(task)) for task in tasks]
    estimates = {k: [pass_at(k, right, scored) for right, scored in counts if scored >= k] for k in ks(attempts)}
    return EvaluatedSource(
        len(tasks),
        len(episodes),
        len(tasks) * attempts - len(episodes),
        fmean(record.outcome for record in episodes) if episodes else None,
        fmean(record.reward for record in episodes) if episodes else None,
        {k: fmean(each) if each else None for k, each in estimates.items()},
        {k: len(each) for k, each in estimates.items()},
    )


def _reasons(stored: StoredRun, failed: int) -> dict[str, int]:
    """The last reasons of the `failed` attempts, the most frequent first."""
    last: dict[str, DeadLetter] = {}
    done = {record.group for record in _evaluated(stored)}
    for _, letter in stored.dead_letters():
        if is_evaluation(letter.group) and letter.group not in done:
            last[letter.group] = max(letter, last.get(letter.group, letter), key=lambda each: each.attempt)
    reasons = Counter(cut(letter.reason, REASON_CHARS) for letter in last.values())
    if failed > len(last):
        reasons[UNKNOWN] = failed - len(last)
    return dict(reasons.most_common())


def shown_result(result: EvaluationResult) -> Group:
    """The result for people: a row for each data source and one for all, and what the numbers rest on."""
    table = Table(box=None, padding=(0, 1))
    table.add_column("source", overflow="fold")
    for column in ("tasks", "scored", "failed", "outcome", "reward", *(f"pass@{k}" for k in ks(result.attempts))):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [*result.sources.items(), *([("all", result.total)] if len(result.sources) > 1 else [])]
    for name, source in rows:
        counts = map(str, (source.tasks, source.scored, source.failed))
        values = (source.mean_outcome, source.mean_reward, *source.pass_at.values())
        table.add_row(name, *counts, *("-" if value is None else f"{value:.3f}" for value in values))
    return Group(table, Text("\n".join(_notes(result))))


def _notes(result: EvaluationResult) -> list[str]:
    lines = [f"outcome and reward are means over scored attempts; right is an outcome of {result.threshold:g} or more"]
    total = result.total
    few = [f"pass@{k} on {count}" for k, count in total.pass_tasks.items() if count < total.tasks]
    if few:
        lines.append(f"too few attempts were scored: {', '.join(few)} of {total.tasks} tasks")
    if result.failures:
        lines.append("failed attempts are in no mean and no pass@k:")
        reasons = list(result.failures.items())
        lines += [f"  {count} x {reason}" for reason, count in reasons[:SHOWN_REASONS]]
        if others := sum(count for _, count in reasons[SHOWN_REASONS:]):
            lines.append(f"  {others} x other reasons")
    return lines
