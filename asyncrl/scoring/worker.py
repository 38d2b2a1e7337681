"""The loop of a scorer: leases trajectories, and returns labels or a failure for each.

A failure is never a reward of zero: the trajectory can be leased again. After too many failures the replay counts it as
a dead letter, which is not leased again. A group that was leased as a whole is delivered as a whole, and fails as a
whole.

If the service that a trajectory needs is unavailable, the trajectory has not failed. It waits in the replay, and for a
while this scorer leases none that need the service.

Scoring runs in a separate thread, so that leases are renewed during long batches. If for too long a scorer has no
results and no call of a model ends, the scorer ends, and its leases go to other scorers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice

from asyncrl.config.schema import ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND, serves
from asyncrl.errors import RefusedError, ScoringError, WireError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.observe.metrics import Metrics
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.replay.client.client import RENEWALS_PER_LEASE, ReplayClient
from asyncrl.replay.failures.backoff import one_line
from asyncrl.scoring.labels import ScoredEpisode
from asyncrl.scoring.samples import EvaluationSamples
from asyncrl.scoring.scorer import KindUnavailableError, Scorer
from asyncrl.scoring.stats import ScoringStats
from asyncrl.types import Lease

REPORT_S = 5.0
POLL_S = 0.1
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0

logger = logging.getLogger(__name__)

Result = ScoredEpisode | ScoringError
Unit = list[Lease]
"""Leases whose results are delivered together: one lease, or all leases of a group."""


class ScoringWorker:
    """Scores until it is stopped.

    - The replay takes leases back `lease_s` after their last renewal.
    - `samples` logs some episodes of evaluations.
    - `spans` records each lease, batch and delivery.
    """

    def __init__(
        self,
        client: ReplayClient,
        scorer: Scorer,
        config: ScoringConfig,
        metrics: Metrics,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        samples: EvaluationSamples | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._spans = spans or NoSpans()
        self._client = client
        self._config = config
        self._serves = serves(config)
        self._metrics = metrics
        self._renew_s = lease_s / RENEWALS_PER_LEASE
        self._clock = clock
        self._renewed = self._progressed = clock()
        self._stats = ScoringStats(clock(), config.guards)
        self._samples = samples
        self._outages = Outages()
        self._error_logger = ErrorLogger(logger)
        self._background = _Background(scorer, self._spans)
        self._calls = 0

    def run(self, stop: threading.Event, drain: threading.Event) -> None:
        """Work until `stop` is set, or until `drain` is set and all leased trajectories are scored. After `stop`, the
        replay gives unfinished leases to other scorers.

        Raises ScoringError: the scorer hangs, or its thread died.
        """
        try:
            while not (stop.is_set() or drain.is_set()):
                self.work(stop)
                if self._stats.age(self._clock()) >= REPORT_S:
                    self.report()
        finally:
            self.report()

    def work(self, stop: threading.Event) -> None:
        """Lease once, and score the leased trajectories."""
        began = self._clock()
        serves = self._outages.available(self._serves, began)
        config = self._config
        with self._spans.span("lease", "worker") as values:
            leases = self._client.lease(
                serves, config.batch_trajectories, config.batch_tokens, config.manager.batch_groups
            )
            values["episodes"] = len(leases)
        self._renewed = self._progressed = self._clock()
        self._stats.waited(self._renewed - began)
        units = _units(leases)
        self._background.begin(units)
        while units and not stop.is_set():
            results = self._background.results()
            if results:
                with self._spans.span("deliver", "worker", units=len(results)):
                    self._deliver(units[: len(results)], results)
            units = units[len(results) :]
            # A model that fails on a whole batch gets the episodes one by one, and no result comes before the last one.
            # So the end of each call counts as progress.
            self._keep(progress=bool(results) or self._calls != self._background.calls)

    def report(self) -> None:
        """Log the metrics since the last report."""
        values, unavailable = self._stats.report(self._clock()), self._outages.text
        texts = {"unavailable": unavailable} if unavailable else {}
        self._metrics.log(int(values["labelled"]), {**values, **texts})

    def _keep(self, progress: bool) -> None:
        """Renew the leases. Raises ScoringError: the scorer hangs."""
        now = self._clock()
        if progress:
            self._progressed, self._calls = now, self._background.calls
        if now - self._progressed > self._config.stall_s:
            raise ScoringError(f"no result within scoring.stall_s={self._config.stall_s:g}: this scorer ends")
        if now - self._renewed > self._renew_s:
            self._client.renew()
            self._renewed = now

    def _deliver(self, units: Sequence[Unit], results: Sequence[list[Result]]) -> None:
        scored = [_scored(unit, found) for unit, found in zip(units, results, strict=True)]
        self._send([pair for pairs in scored for pair in pairs if not _is_group(pair[0])])
        for pairs in scored:
            if pairs and _is_group(pairs[0][0]):
                self._send_group(pairs)
        for unit, found in zip(units, results, strict=True):
            failure = next((each for each in found if isinstance(each, ScoringError)), None)
            if isinstance(failure, KindUnavailableError):
                self._outages.begin(failure, self._clock())
                self._stats.count_failure("waited", len(unit))
                continue
            self._outages.end(unit[0].kinds, self._clock())
            if failure is not None:
                self._fail(unit, failure)

    def _send(self, scored: Sequence[tuple[Lease, ScoredEpisode]]) -> None:
        """Deliver labels together. Those that the replay refuses are failures."""
        if not scored:
            return
        errors = self._client.label([each.labels for _, each in scored])
        for pair, error in zip(scored, errors, strict=True):
            if error is None:
                self._count([pair])
            else:
                self._fail([pair[0]], error)

    def _send_group(self, scored: Sequence[tuple[Lease, ScoredEpisode]]) -> None:
        try:
            self._client.label_group([each.labels for _, each in scored])
        except (RefusedError, WireError) as error:
            self._fail([lease for lease, _ in scored], error)
        else:
            self._count(scored)

    def _count(self, scored: Sequence[tuple[Lease, ScoredEpisode]]) -> None:
        for lease, each in scored:
            self._stats.count(lease.trajectory, each)
            if each.final and self._samples is not None:
                self._samples.show(lease.task, lease.trajectory, each.labels)

    def _fail(self, unit: Unit, error: ScoringError | RefusedError | WireError) -> None:
        """Report a unit as failed. If it is a group, only its first trajectory is named, by which the replay finds the
        others."""
        trajectory = unit[0].trajectory
        what = f"group {trajectory.group_id}" if _is_group(unit[0]) else f"trajectory {trajectory.id}"
        self._error_logger.exception(f"{what} was not scored: {error}", error)
        self._client.scoring_failed(trajectory.id, str(error))
        self._stats.count_failure("failed" if isinstance(error, ScoringError) else "refused", len(unit))


def _is_group(lease: Lease) -> bool:
    return GROUP_KIND in lease.kinds


def _scored(unit: Unit, results: Sequence[Result]) -> list[tuple[Lease, ScoredEpisode]]:
    """The leases of a unit with their results; empty if one of the leases failed."""
    pairs = [(lease, each) for lease, each in zip(unit, results, strict=True) if isinstance(each, ScoredEpisode)]
    return pairs if len(pairs) == len(unit) else []


def _units(leases: Iterable[Lease]) -> list[Unit]:
    """The units of the leases. The leases of a group must be neighbours."""
    by_unit = groupby(leases, lambda each: each.trajectory.group_id if _is_group(each) else each.trajectory.id)
    return [list(unit) for _, unit in by_unit]


class Outages:
    """The kinds of scores whose service is unavailable. Each is tried again after pauses that grow. Times are seconds
    of a monotonic clock."""

    def __init__(self) -> None:
        # For each kind: the start of the outage, the length of its last pause, and the end of that pause.
        self._outages: dict[str, tuple[float, float, float]] = {}
        self._reasons: dict[str, str] = {}

    def available(self, kinds: Iterable[str], now: float) -> list[str]:
        """The kinds that may be tried now."""
        return [kind for kind in kinds if kind not in self._outages or now >= self._outages[kind][2]]

    def begin(self, error: KindUnavailableError, now: float) -> None:
        """Start a pause for the kind: FIRST_PAUSE_S, or twice the last pause of this outage, but at most
        LONGEST_PAUSE_S. If the kind is paused already, nothing changes."""
        since, pause, until = self._outages.get(error.kind, (now, FIRST_PAUSE_S / 2, now))
        if now < until:
            return
        pause = min(2 * pause, LONGEST_PAUSE_S)
        self._outages[error.kind] = since, pause, now + pause
        self._reasons[error.kind] = str(error)
        message = "%s has been unavailable for %.0f s: its trajectories wait, and are tried again in %.0f s (%s)"
        logger.warning(message, error.kind, now - since, pause, error)

    @property
    def text(self) -> str:
        """The unavailable kinds with their reasons, or ""."""
        return "; ".join(f"{kind}: {one_line(reason)}" for kind, reason in self._reasons.items())

    def end(self, kinds: Sequence[str], now: float) -> None:
        """End the outages of these kinds, whose services answered."""
        for kind in self._outages.keys() & set(kinds):
            del self._reasons[kind]
            logger.warning("%s is available again after %.0f s", kind, now - self._outages.pop(kind)[0])


class _Background:
    """A thread that scores batches, one after another. It ends with the process. `spans` records each batch. `calls` is
    the number of calls of models that have ended."""

    def __init__(self, scorer: Scorer, spans: Spans) -> None:
        self.calls = 0
        self._scorer = scorer
        self._spans = spans
        self._batches: queue.SimpleQueue[Sequence[Unit]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[list[Result] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="scoring", daemon=True).start()

    def begin(self, units: Sequence[Unit]) -> None:
        self._batches.put(units)

    def results(self) -> list[list[Result]]:
        """The results of the next units that are ready, in order; waits up to POLL_S for the first. Raises
        ScoringError: the thread died."""
        ready: list[list[Result]] = []
        try:
            while True:
                result = self._results.get(timeout=POLL_S) if not ready else self._results.get_nowait()
                if result is None:
                    raise ScoringError("the scoring thread died; its traceback is above")
                ready.append(result)
        except queue.Empty:
            return ready

    def _called(self) -> None:
        self.calls += 1

    def _run(self) -> None:
        try:
            while True:
                self._score(self._batches.get())
        except BaseException:
            logger.exception("the scoring thread died")
            self._results.put(None)

    def _score(self, units: Sequence[Unit]) -> None:
        leases = [lease for unit in units for lease in unit]
        with self._spans.span("score", "scoring", episodes=len(leases)):
            results = iter(self._scorer.score(leases, self._called))
            for unit in units:
                self._results.put(list(islice(results, len(unit))))
