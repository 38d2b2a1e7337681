"""Shows the progress of a run on its terminal: a table that follows the metrics files of the roles."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console

from asyncrl.runs.elapsed import earlier_s
from asyncrl.runs.health.evidence import read_evidence
from asyncrl.runs.health.health import judge
from asyncrl.runs.lines import finite
from asyncrl.runs.live_rows import LINE_S, REFRESH_S, LiveRows
from asyncrl.runs.pace import StepPace
from asyncrl.runs.progress import RunProgress, number, pace_of, progress_rows
from asyncrl.runs.role_errors import RoleErrors
from asyncrl.runs.run import Run
from asyncrl.runs.standstill import Standstill
from asyncrl.runs.state.situation import RolesReader
from asyncrl.runs.state.working import working
from asyncrl.text import duration

STORE_IS_FULL = "full, so no episode starts: raise replay.max_store_gb, or keep less with replay.retention"
RATE_S = 15.0
"""The seconds over which the rate of failures is averaged. Replays report failures every five seconds."""
REPEATED = frozenset({"reward", "empty", "solved", "filter"})
"""The kinds of findings that are printed each time that they begin to hold. Others are printed once."""
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
        self._replays = [run.raw_tail(name) for name in replays]
        self._run, self._shards, self._roles = run, shards, RolesReader(run)
        self._judged: tuple[tuple[str, str], ...] = ()
        self._told: set[str] = set()
        self._next_health = 0.0
        self._steps = steps
        self._restarts = restarts
        self._errors = RoleErrors(run.folder, from_now=True)
        self._view = LiveRows(console, clock)
        self._clock = clock
        self._began = clock() - earlier_s(run)
        self._pace = StepPace(0, steps, None)
        self._failures: deque[tuple[float, float]] = deque()
        self._standstill = Standstill(waits, clock)

    def __enter__(self) -> TerminalTable:
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)
        self._standstill.close()

    def update(self) -> None:
        """Show the newest values, if it is time."""
        if self._view.is_due():
            self._tell_errors()
            rows = self.rows()
            self._tell_health()
            self._view.show(self._pace, rows)

    def _tell_errors(self) -> None:
        """Print each error of a role when it comes for the first time."""
        for text in self._errors.new_texts():
            self._view.tell(text)

    def _tell_health(self) -> None:
        """Print each finding when it begins to hold, above the table or between the lines."""
        files = tuple(self._run.metrics_files().items())
        if files == self._judged or (now := self._clock()) < self._next_health:
            return
        self._judged, self._next_health = files, now + LINE_S
        findings = judge(read_evidence(self._run, is_running=True)).findings
        for each in findings:
            if each.kind not in self._told:
                label, style = ("remark", "bold") if each.is_good else ("warning", "yellow")
                self._view.tell(f"{label}: {each.text}", style)
        # A share may cross its bound many times, so findings about shares are not in REPEATED.
        self._told = {each.kind for each in findings} | (self._told - REPEATED)

    def rows(self) -> list[tuple[str, str]]:
        """The names and formatted values that are shown."""
        by_role = self._restarts()
        restarts = sum(by_role.values())
        values = self._progress.values(by_role)
        self._pace = pace_of(values, self._steps)
        works = working(self._roles.read(self._run.processes(), self._shards))
        rows = [
            ("elapsed", duration(self._clock() - self._began)),
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
            rows.append(("held-out failed", f"{number(failed)} of {number(failed + measured.get('eval/count', 0))}"))
        rows += self._errors.rows()
        if restarts:
            rows.append(("restarts", str(restarts)))
        replays = [tail.read() for tail in self._replays]
        if any(_count(values, "store_bytes") > _count(values, "high_water_bytes", math.inf) for values in replays):
            rows.append(("store", STORE_IS_FULL))
        rows += _filter_rows(replays)
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
        """The rate at which episodes and scorings fail, if they do, and the newest failure of each replay. If replays
        give reasons why they issue few tickets (permissions to run an episode), these reasons replace the newest
        failures."""
        now = self._clock()
        counted = ("failures", "scoring_failures")
        self._failures.append((now, sum(_count(values, name) for values in replays for name in counted)))
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


def _count(values: Mapping[str, Any], name: str, unknown: float = 0) -> float:
    """A counter of a replay, whose row may have any content; `unknown` if it has no such number."""
    found = finite(values.get(name))
    return unknown if found is None else found


def _filter_rows(replays: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The reasons why filters refuse every group of a shard. While other shards still have groups to train, the run
    goes on without the shards whose tasks are solved."""
    rows = [("filter", str(text)) for values in replays if (text := values.get("refusing"))]
    solved = [str(text) for values in replays if (text := values.get("solved"))]
    if solved and len(solved) < len(replays):
        count = f"{len(solved)} of {len(replays)} shards of the replay"
        return [*rows, ("filter", f"the policy solves the tasks of {count}; steps train the groups of the others")]
    return [*rows, *(("filter", text) for text in solved)]
