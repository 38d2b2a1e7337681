"""The progress of a run on its terminal: a table that follows the metrics files of the roles."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from asyncrl.config.schema import TrainConfig
from asyncrl.observe.sinks import metrics_file
from asyncrl.observe.warnings import WINDOW, failure_warning, learning_warnings

STORE_IS_FULL = "full, so no episode starts: raise replay.max_store_gb, or keep less by replay.retention"
REFRESH_S = 0.5
LINE_S = 10.0
RATE_S = 15.0
"""Failures a second are those of so many seconds: replays report theirs every five."""


class Tail:
    """The newest values in a growing file of JSON lines, reading each byte once. A learner that resumes replaces its
    file, which is then read from the beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id = self._position = 0
        self.values: dict[str, Any] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)

    def read(self) -> dict[str, Any]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file_id = os.fstat(file.fileno()).st_ino
                self._position = file.seek(self._position if file_id == self._file_id else 0)
                self._file_id = file_id
                lines = file.read().split(b"\n")
                self._position = file.tell() - len(lines[-1])
            for line in lines[:-1]:
                self.recent.append(json.loads(line))
                self.values.update(self.recent[-1])
        return self.values


class Dashboard:
    """A live table on a terminal; elsewhere one line every few seconds. `clock` gives seconds."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        restarts: Callable[[], dict[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner, self._evaluation = (Tail(metrics_file(run_dir, name)) for name in ("learner", "evaluation"))
        self._actors: dict[str, Tail] = {}
        shards = config.replay.shards
        replays = ["replay"] if shards == 1 else [f"replay-{shard}" for shard in range(shards)]
        self._replays = [Tail(metrics_file(run_dir, name)) for name in replays]
        self._run_dir = run_dir
        self._warned: set[str] = set()
        self._steps = config.learner.steps
        self._restarts = restarts
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._started = clock()
        self._failures: deque[tuple[float, int]] = deque()
        self._next = 0.0

    def __enter__(self) -> Dashboard:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self) -> None:
        """Show the newest values, if it is time."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (REFRESH_S if self._console.is_terminal else LINE_S)
        rows = self.rows()
        self._warn()
        if self._console.is_terminal:
            self._live.update(_table(rows), refresh=True)
        else:
            line = "  ".join(f"{name} {escape(value)}" for name, value in rows)
            self._console.print(line, soft_wrap=True, highlight=False)

    def _warn(self) -> None:
        """Print each warning when it begins to hold, above the table or between the lines."""
        recent = self._learner.recent
        warnings = learning_warnings(recent, str(self._run_dir)) if len(recent) == WINDOW else {}
        if failing := self._failure_warning():
            warnings["failing"] = failing
        for kind in warnings.keys() - self._warned:
            self._console.print(f"warning: {warnings[kind]}", style="yellow", soft_wrap=True, markup=False)
        # The share of all episodes may come and go around its bound, so that one is told once.
        self._warned = set(warnings) | (self._warned & {"failing"})

    def _failure_warning(self) -> str:
        replays = [tail.values for tail in self._replays]
        counts = {
            name: sum(int(values.get(name, 0)) for values in replays) for name in ("accepted", "dead", "failures")
        }
        newest = next((str(values["newest_failure"]) for values in replays if values.get("newest_failure")), "")
        return failure_warning(counts, newest, str(self._run_dir))

    def rows(self) -> list[tuple[str, str]]:
        """What is shown: names and formatted values."""
        learner, measured = self._learner.read(), self._evaluation.read()
        by_role = self._restarts()
        for name in by_role:
            if name.startswith("actor-") and name not in self._actors:
                self._actors[name] = Tail(metrics_file(self._run_dir, name))
        actors = [tail.read() for name, tail in self._actors.items() if name in by_role]
        restarts = sum(by_role.values())
        rows = [
            ("elapsed", f"{self._clock() - self._started:.0f}s"),
            ("step", f"{learner['step'] + 1 if learner else 0}/{self._steps}"),
            ("reward", _number(learner.get("reward/mean"))),
            *((f"held-out {name}", _number(measured[f"eval/{name}"])) for name in ("outcome", "accuracy") if measured),
            ("lag", _number(learner.get("lag/max"))),
            ("learner idle", _share(learner.get("idle"))),
            ("rollout tok/s", _number(sum(actor.get("tokens_per_s", 0.0) for actor in actors))),
            ("rollout idle", _share(sum(actor.get("idle", 0.0) for actor in actors) / max(1, len(actors)))),
        ]
        if recomputed := sum(actor.get("recomputed_tokens", 0.0) for actor in actors):
            rows.append(("recomputed tokens", _number(recomputed)))
        if failed := measured.get("eval/failed"):
            rows.append(("held-out failed", f"{_number(failed)} of {_number(failed + measured['eval/count'])}"))
        if restarts:
            rows.append(("restarts", str(restarts)))
        replays = [tail.read() for tail in self._replays]
        if any(values.get("store_bytes", 0) > values.get("high_water_bytes", math.inf) for values in replays):
            rows.append(("store", STORE_IS_FULL))
        return rows + self._failing(replays)

    def _failing(self, replays: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """How fast episodes and scorings fail, if they do, and the newest failure of each replay."""
        now = self._clock()
        counted = ("failures", "scoring_failures")
        self._failures.append((now, sum(int(values.get(name, 0)) for values in replays for name in counted)))
        while len(self._failures) > 2 and self._failures[1][0] <= now - RATE_S:
            self._failures.popleft()
        (since, before), (_, count) = self._failures[0], self._failures[-1]
        slowed = [("failing", str(values["failing"])) for values in replays if values.get("failing")]
        if count == before:
            return slowed
        newest = [
            ("newest failure", str(values["newest_failure"])) for values in replays if values.get("newest_failure")
        ]
        return [("failed/s", _number((count - before) / max(now - since, REFRESH_S))), *(slowed or newest)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(f"[dim]{name}", escape(value))
    return table
