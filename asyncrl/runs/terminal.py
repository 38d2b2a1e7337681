"""Shows the progress of a run on its terminal: a table that follows the metrics files of the roles."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from asyncrl.runs.pace import Pace
from asyncrl.runs.progress import RunProgress, number, pace_of, progress_rows
from asyncrl.runs.run import Run
from asyncrl.runs.situation import RolesReader
from asyncrl.runs.standstill import Standstill
from asyncrl.runs.warnings import WINDOW, failure_warning, learning_warnings
from asyncrl.runs.working import working
from asyncrl.text import duration, shortened

STORE_IS_FULL = "full, so no episode starts: raise replay.max_store_gb, or keep less with replay.retention"
REFRESH_S = 0.5
LINE_S = 10.0
RATE_S = 15.0
"""The seconds over which the rate of failures is averaged. Replays report failures every five seconds."""
BAR_CHARS = 40
LONGEST_VALUE = 160
"""The most characters of a value in a line. Reasons of failures may be as long as a page."""
FLOW = ("accepted", "labelled", "trained")
"""The counters of replays that grow while a run makes progress. Deliveries of actors and steps of the learner are
progress, too."""


class TerminalTable:
    """Shows a live table with a bar on a terminal, and elsewhere one line every few seconds. `clock` gives seconds, and
    `waits` gives the reason why the run waits. `console` is standard error by default."""

    def __init__(
        self,
        run: Run,
        steps: int,
        shards: int,
        restarts: Callable[[], dict[str, int]],
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[], str] = str,
        console: Console | None = None,
    ) -> None:
        self._progress = RunProgress(run, from_now=True)
        replays = ["replay"] if shards == 1 else [f"replay-{shard}" for shard in range(shards)]
        self._replays = [run.tail(name) for name in replays]
        self._run, self._shards, self._roles = run, shards, RolesReader(run)
        self._folder = str(run.folder)
        self._warned: set[str] = set()
        self._steps = steps
        self._restarts = restarts
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._started = clock()
        self._pace = Pace(0, steps, None)
        self._failures: deque[tuple[float, int]] = deque()
        self._next = 0.0
        self._standstill = Standstill(waits, clock)

    def __enter__(self) -> TerminalTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._standstill.close()

    def update(self) -> None:
        """Show the newest values, if it is time."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (REFRESH_S if self._console.is_terminal else LINE_S)
        rows = self.rows()
        self._warn()
        if self._console.is_terminal:
            self._live.update(Group(_bar(self._pace), _table(rows)), refresh=True)
        else:
            line = "  ".join(f"{name} {escape(shortened(value, LONGEST_VALUE))}" for name, value in rows)
            self._console.print(line, soft_wrap=True, highlight=False)

    def _warn(self) -> None:
        """Print each warning when it begins to hold, above the table or between the lines."""
        recent = self._progress.learner.recent
        warnings = learning_warnings(recent, self._folder) if len(recent) >= WINDOW else {}
        if failing := self._failure_warning():
            warnings["failing"] = failing
        for kind in warnings.keys() - self._warned:
            self._console.print(f"warning: {warnings[kind]}", style="yellow", soft_wrap=True, markup=False)
        # The share of failures may cross its bound many times, so this warning is printed once.
        self._warned = set(warnings) | (self._warned & {"failing"})

    def _failure_warning(self) -> str:
        replays = [tail.values for tail in self._replays]
        counts = {
            name: sum(int(values.get(name, 0)) for values in replays) for name in ("accepted", "dead", "failures")
        }
        newest = next((str(values["newest_failure"]) for values in replays if values.get("newest_failure")), "")
        return failure_warning(counts, newest, self._folder)

    def rows(self) -> list[tuple[str, str]]:
        """The names and formatted values that are shown."""
        by_role = self._restarts()
        restarts = sum(by_role.values())
        values = self._progress.values(by_role)
        self._pace = pace_of(values, self._steps)
        works = working(self._roles.read(self._run.processes(), self._shards), self._pace.done)
        rows = [
            ("elapsed", duration(self._clock() - self._started)),
            *progress_rows(values, self._steps),
            *([("now", works)] if works else []),
        ]
        actors, measured = self._progress.actors(by_role), self._progress.evaluation.values
        if recomputed := sum(actor.get("recomputed_tokens", 0.0) for actor in actors):
            rows.append(("recomputed tokens", number(recomputed)))
        if pauses := sum(actor.get("push_pauses", 0.0) for actor in actors):
            mean_s = sum(actor.get("push_pause_s", 0.0) for actor in actors) / pauses
            longest_s = max(actor.get("push_pause_max_s", 0.0) for actor in actors)
            rows.append(("stop of a push", f"{1000 * mean_s:.0f} ms, at most {1000 * longest_s:.0f}"))
        if failed := measured.get("eval/failed"):
            rows.append(("held-out failed", f"{number(failed)} of {number(failed + measured['eval/count'])}"))
        if restarts:
            rows.append(("restarts", str(restarts)))
        replays = [tail.read() for tail in self._replays]
        if any(values.get("store_bytes", 0) > values.get("high_water_bytes", math.inf) for values in replays):
            rows.append(("store", STORE_IS_FULL))
        return rows + self._failing(replays) + self._waits(replays, actors)

    def _waits(
        self, replays: Sequence[Mapping[str, Any]], actors: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, str]]:
        """The cause of the wait, if the run makes no progress."""
        steps = [each.values.get("step") for each in (self._progress.learner, self._progress.evaluation)]
        flow = [values.get(name) for values in replays for name in FLOW]
        waits = self._standstill.text((*steps, *flow, *(actor.get("episodes") for actor in actors)))
        return [("waits", waits)] if waits else []

    def _failing(self, replays: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """The rate at which episodes and scorings fail, if they do, and the newest failure of each replay.
        Reasons why replays issue few tickets replace the newest failures."""
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
        return [("failed/s", number((count - before) / max(now - since, REFRESH_S))), *(slowed or newest)]


def _bar(pace: Pace) -> Table:
    """A bar of the steps, with the share that is done and the time left."""
    share, left_s = pace.share or 0.0, pace.left_s
    left = "" if left_s is None else f"{duration(left_s)} left"
    bar = Table.grid(padding=(0, 1))
    bar.add_row("", ProgressBar(total=1.0, completed=share, width=BAR_CHARS), f"{share:.0%}", f"[dim]{left}")
    return bar


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(f"[dim]{name}", escape(value))
    return table
