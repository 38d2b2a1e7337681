"""Computes the results of an evaluation, for each data source and for all tasks: outcomes, rewards, process scores,
lengths, pass@k, best@k, maj@k and failures.

An attempt is right if its outcome is at least a threshold. `replay.estimates` computes the three estimates at k, from
the tasks with at least k scored attempts. A failed attempt only counts as failed. Means and estimates leave it out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from asyncrl.ids import held_out_row, is_evaluation
from asyncrl.replay.held_out.estimates import ks
from asyncrl.replay.held_out.tally import Tally
from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord, TrajectoryState
from asyncrl.replay.stored import StoredRun
from asyncrl.text import cut

REASON_CHARS = 160
SHOWN_REASONS = 10
UNKNOWN = "the reason was not kept (replay.max_dead_letters)"


@dataclass(frozen=True, slots=True)
class EvaluatedSource:
    """The result on the tasks of one data source, or on all tasks.

    - the means are None if no attempt was scored; `mean_process` is also None without a process reward model
    - `mean_length` is in policy tokens
    - `pass_at`, `best_at`, `maj_at`: the estimate for each k; None if no task has k scored attempts. `maj_at` is
      also None if no attempt gave an answer that counts as a vote. On all tasks, it leaves out sources without a vote
    - `pass_tasks`: for each k, the number of tasks with k scored attempts
    """

    tasks: int
    scored: int
    failed: int
    mean_outcome: float | None
    accuracy: float | None
    mean_reward: float | None
    mean_process: float | None
    mean_length: float | None
    pass_at: Mapping[int, float | None]
    best_at: Mapping[int, float | None]
    maj_at: Mapping[int, float | None]
    pass_tasks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of a complete evaluation with `attempts` per task. `failures` counts failed attempts by reason."""

    attempts: int
    threshold: float
    total: EvaluatedSource
    sources: Mapping[str, EvaluatedSource]
    failures: Mapping[str, int]


def read_result(stored: StoredRun, sources: Sequence[str], attempts: int, threshold: float) -> EvaluationResult:
    """The result of a complete evaluation from its store. `sources` has the data source of each held-out task."""
    scored: dict[int, list[TrajectoryRecord]] = defaultdict(list)
    for record in _evaluated(stored):
        scored[held_out_row(record.group)].append(record)
    by_source: dict[str, list[Sequence[TrajectoryRecord]]] = defaultdict(list)
    for row, source in enumerate(sources):
        by_source[source].append(scored[row])
    tallies = {name: Tally.of(tasks, attempts, threshold) for name, tasks in sorted(by_source.items())}
    return EvaluationResult(
        attempts,
        threshold,
        _summarise(Tally.of_sources(tallies.values()), len(sources), attempts),
        {name: _summarise(tally, len(by_source[name]), attempts) for name, tally in tallies.items()},
        _reasons(stored, len(sources) * attempts - sum(map(len, scored.values()))),
    )


def _evaluated(stored: StoredRun) -> Iterable[TrajectoryRecord]:
    for shard in stored.each(TrajectoryRecord.all):
        yield from (record for _, record in shard if record.state is TrajectoryState.EVALUATED)


def _summarise(tally: Tally, tasks: int, attempts: int) -> EvaluatedSource:
    means, estimates = tally.means, tally.estimates
    return EvaluatedSource(
        tasks=tasks,
        scored=tally.count,
        failed=tasks * attempts - tally.count,
        mean_outcome=means.get("outcome"),
        accuracy=means.get("accuracy"),
        mean_reward=means.get("reward"),
        mean_process=means.get("process"),
        mean_length=means.get("length"),
        pass_at={k: estimates.get(f"pass@{k}") for k in ks(attempts)},
        best_at={k: estimates.get(f"best@{k}") for k in ks(attempts)},
        maj_at={k: estimates.get(f"maj@{k}") for k in ks(attempts)},
        pass_tasks={k: tally.at[f"pass@{k}"][1] for k in ks(attempts)},
    )


def _reasons(stored: StoredRun, failed: int) -> dict[str, int]:
    """Count the `failed` attempts by the reason of their last failure, the most frequent reason first."""
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
    """The result for people: tables of means and of estimates by data source, and notes."""
    rows = [*result.sources.items(), *([("all", result.total)] if len(result.sources) > 1 else [])]
    means = _table(["source", "tasks", "scored", "failed", "outcome", "accuracy", "reward", "process", "length"])
    for name, source in rows:
        counts = map(str, (source.tasks, source.scored, source.failed))
        values = (source.mean_outcome, source.accuracy, source.mean_reward, source.mean_process)
        length = "-" if source.mean_length is None else f"{source.mean_length:.1f}"
        means.add_row(name, *counts, *map(_shown, values), length)
    at = _table(["source", "", *(f"k={k}" for k in ks(result.attempts))])
    for name, source in rows:
        for estimate, values_at in (("pass@k", source.pass_at), ("best@k", source.best_at), ("maj@k", source.maj_at)):
            at.add_row(name, estimate, *map(_shown, values_at.values()))
    return Group(means, Text(), at, Text("\n".join(_notes(result))))


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _notes(result: EvaluationResult) -> list[str]:
    lines = [
        f"means are over scored attempts; an attempt is right if its outcome is at least {result.threshold:g}",
        "pass@k: at least one of k attempts is right; best@k: the best outcome of k; maj@k: the outcome of the "
        "most frequent answer among k",
    ]
    total = result.total
    few = [f"pass@{k} on {count}" for k, count in total.pass_tasks.items() if count < total.tasks]
    if few:
        lines.append(f"too few attempts were scored: {', '.join(few)} of {total.tasks} tasks")
    if result.failures:
        lines.append("failed attempts, which means and estimates leave out:")
        reasons = list(result.failures.items())
        lines += [f"  {count} x {reason}" for reason, count in reasons[:SHOWN_REASONS]]
        if others := sum(count for _, count in reasons[SHOWN_REASONS:]):
            lines.append(f"  {others} x other reasons")
    return lines
