"""Sums the results of an evaluation for each data source, so that the sums of all shards can be added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.replay.held_out.estimates import best_at, ks, majority_at, pass_at
from asyncrl.replay.store.records import TrajectoryRecord

RIGHT = 1.0
"""The smallest outcome that counts as right."""
SOURCES = "sources"
SAMPLE = "sample"


class Tally(msgspec.Struct):
    """Sums over the scored attempts at the tasks of one data source.

    - `count`: the number of these attempts
    - `outcome`, `reward`: the sums of outcomes and rewards
    - `right`: the number of right outcomes
    - `length`: the sum of lengths in policy tokens
    - `process`: the sum of process scores
    - `judged`: the number of attempts that have a process score
    - `voted`: the number of attempts that have a vote. If there are none, nothing is known of maj@k
    - `at`: for each of pass@k, best@k and maj@k, the sum of the tasks' estimates and the number of these tasks. A task
      needs k scored attempts for an estimate
    """

    count: int = 0
    outcome: float = 0.0
    right: int = 0
    reward: float = 0.0
    length: int = 0
    process: float = 0.0
    judged: int = 0
    voted: int = 0
    at: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, tasks: Iterable[Sequence[TrajectoryRecord]], attempts: int, threshold: float = RIGHT) -> Tally:
        """The tally of tasks, each given by its scored attempts. `attempts` is the number of attempts at each task,
        including failed ones. An outcome of at least `threshold` is right."""
        tally = cls(at={f"{name}@{k}": (0.0, 0) for k in ks(attempts) for name in ("pass", "best", "maj")})
        for task in tasks:
            tally._add_task(task, attempts, threshold)
        return tally

    def _add_task(self, task: Sequence[TrajectoryRecord], attempts: int, threshold: float) -> None:
        right = sum(record.outcome >= threshold for record in task)
        judged = [record.process for record in task if record.process is not None]
        self.count += len(task)
        self.outcome += sum(record.outcome for record in task)
        self.right += right
        self.reward += sum(record.reward for record in task)
        self.length += sum(record.sampled for record in task)
        self.process += sum(judged)
        self.judged += len(judged)
        votes, outcomes = [record.vote for record in task], [record.outcome for record in task]
        self.voted += sum(map(bool, votes))
        for k in ks(attempts):
            if k > len(task):
                continue
            # A task without a vote counts in maj@k. Without it, maj@k would be a mean over easier tasks than best@k.
            estimates = {
                "pass": pass_at(k, right, len(task)),
                "best": best_at(k, outcomes),
                "maj": majority_at(k, votes, outcomes),
            }
            for name, estimate in estimates.items():
                total, number = self.at[f"{name}@{k}"]
                self.at[f"{name}@{k}"] = total + estimate, number + 1

    def __add__(self, other: Tally) -> Tally:
        pairs = {name: (self.at.get(name, (0.0, 0)), other.at.get(name, (0.0, 0))) for name in {**self.at, **other.at}}
        return Tally(
            self.count + other.count,
            self.outcome + other.outcome,
            self.right + other.right,
            self.reward + other.reward,
            self.length + other.length,
            self.process + other.process,
            self.judged + other.judged,
            self.voted + other.voted,
            {name: (one[0] + two[0], one[1] + two[1]) for name, (one, two) in pairs.items()},
        )

    @property
    def means(self) -> dict[str, float]:
        """The means over scored attempts by name, with `process` only if a model scored steps. Empty without
        attempts."""
        sums = {"outcome": self.outcome, "accuracy": self.right, "reward": self.reward, "length": self.length}
        means = {name: total / self.count for name, total in sums.items() if self.count}
        return means | ({"process": self.process / self.judged} if self.judged else {})

    @property
    def estimates(self) -> dict[str, float]:
        """The means of pass@k, best@k and maj@k over the tasks with an estimate; without maj@k if there is no vote."""
        return {name: total / tasks for name, (total, tasks) in self._known.items() if tasks}

    @property
    def _known(self) -> dict[str, tuple[float, int]]:
        """The sums in `at`, without those of maj@k if there is no vote."""
        return {name: sums for name, sums in self.at.items() if self.voted or not name.startswith("maj@")}

    @classmethod
    def of_sources(cls, tallies: Iterable[Tally]) -> Tally:
        """The tally of all tasks, from the complete tallies of the data sources. Sources without a vote have no part in
        maj@k."""
        return sum((msgspec.structs.replace(each, at=each._known) for each in tallies), cls())


def evaluation_values(result: Mapping[str, Any]) -> dict[str, float]:
    """The result of an evaluation as metrics by name: over all tasks, and if there are several data sources, also for
    each source as SOURCE/NAME. Estimates for k = 1 are left out, since they equal the accuracy or the mean outcome."""
    sources = {name: msgspec.convert(plain, Tally) for name, plain in result[SOURCES].items()}
    total = Tally.of_sources(sources.values())
    values = {name: float(value) for name, value in result.items() if name not in (SOURCES, SAMPLE)}
    values = _values(total) | values
    if len(sources) > 1:
        for source, tally in sorted(sources.items()):
            values |= {f"{source}/{name}": value for name, value in _values(tally).items()}
            values[f"{source}/count"] = float(tally.count)
    return values


def _values(tally: Tally) -> dict[str, float]:
    return tally.means | {name: value for name, value in tally.estimates.items() if not name.endswith("@1")}


def tallies(records: Iterable[tuple[int, TrajectoryRecord]], attempts: int) -> dict[str, Any]:
    """The tally of each data source as plain values. `records` are scored attempts with the rows of their tasks."""
    tasks: dict[tuple[str, int], list[TrajectoryRecord]] = defaultdict(list)
    for row, record in records:
        tasks[record.data_source, row].append(record)
    names = sorted({source for source, _ in tasks})
    found = {
        name: Tally.of((task for (source, _), task in tasks.items() if source == name), attempts) for name in names
    }
    return {name: msgspec.to_builtins(tally) for name, tally in found.items()}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tallies of all shards, added by data source."""
    total: dict[str, Tally] = defaultdict(Tally)
    for part in parts:
        for name, plain in part.items():
            total[name] = total[name] + msgspec.convert(plain, Tally)
    return {name: msgspec.to_builtins(tally) for name, tally in sorted(total.items())}
