"""A scorer at work: leases trajectories, and returns for each its labels, or the reason why it has none.

A failure is never a reward of zero: the replay gives the trajectory out again, and after too many failures sets it
aside and counts it. That a service is away is no failure of a trajectory: it goes back as it came, and its kind of
scores is left alone for a while. Scoring runs in a thread of its own, so that leases are renewed however long a batch
takes; a scorer that gives nothing for too long ends instead, and its leases go to others.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from asyncrl.config.needs import serves
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import RefusedError, ScoringError, WireError
from asyncrl.observe.metrics import Metrics
from asyncrl.scoring.guards import HackAlarm
from asyncrl.scoring.outages import AwayError, Outages
from asyncrl.scoring.scorer import Scored
from asyncrl.scoring.tally import Tally
from asyncrl.types import Labels, Lease

REPORT_S = 5.0
RENEWALS_PER_LEASE = 4
POLL_S = 0.1

logger = logging.getLogger(__name__)

Result = Scored | ScoringError


class ScoringClient(Protocol):
    """The replay, as a scorer sees it. Every call waits until the replay has answered."""

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int) -> list[Lease]:
        """Trajectories that need a kind of `serves`, bounded by number and tokens; waits about a second for the
        first. What was leased before, and neither labelled nor failed, goes back first, and no attempt is counted."""
        ...

    def renew(self) -> None:
        """Keep what is leased for another while."""
        ...

    def label(self, labels: Sequence[Labels]) -> None:
        """Raises RefusedError; WireError: some cannot be sent, and none was."""
        ...

    def scoring_failed(self, trajectory_id: str, reason: str) -> None: ...


class BatchScorer(Protocol):
    """Scores leases, in order; see `Scorer`."""

    def score(self, leases: Sequence[Lease]) -> Iterator[Result]: ...


class Worker:
    """Scores until told to stop. `lease_s` is how long the replay waits for a silent scorer."""

    def __init__(
        self,
        client: ScoringClient,
        scorer: BatchScorer,
        config: ScoringConfig,
        metrics: Metrics,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._serves = serves(config)
        self._metrics = metrics
        self._renew_s = lease_s / RENEWALS_PER_LEASE
        self._clock = clock
        self._renewed = self._progressed = clock()
        self._tally = Tally(clock())
        self._alarm = HackAlarm(config.guards)
        self._outages = Outages()
        self._background = _Background(scorer)

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set; what is then unfinished, the replay gives to others.

        Raises ScoringError: the scorer hangs, or its thread died.
        """
        try:
            while not stop.is_set():
                self.work(stop)
                if self._tally.age(self._clock()) >= REPORT_S:
                    self._report()
        finally:
            self._report()

    def work(self, stop: threading.Event) -> None:
        """Lease once, and score what there is."""
        asked = self._clock()
        serves = self._outages.within_reach(self._serves, asked)
        leases = self._client.lease(serves, self._config.batch_trajectories, self._config.batch_tokens)
        self._renewed = self._progressed = self._clock()
        self._tally.waited(self._renewed - asked)
        self._background.begin(leases)
        while leases and not stop.is_set():
            results = self._background.results()
            self._deliver(leases[: len(results)], results)
            leases = leases[len(results) :]
            self._keep(progress=bool(results))

    def _keep(self, progress: bool) -> None:
        """Renew what is leased, unless the scorer hangs."""
        now = self._clock()
        if progress:
            self._progressed = now
        if now - self._progressed > self._config.stall_s:
            raise ScoringError(f"no result within scoring.stall_s={self._config.stall_s:g}: this scorer ends")
        if now - self._renewed > self._renew_s:
            self._client.renew()
            self._renewed = now

    def _deliver(self, leases: Sequence[Lease], results: Sequence[Result]) -> None:
        scored = [(lease, result) for lease, result in zip(leases, results, strict=True) if isinstance(result, Scored)]
        self._send(scored)
        for lease, result in zip(leases, results, strict=True):
            if isinstance(result, AwayError):
                self._outages.began(result, self._clock())
                self._tally.count_failure("waited")
            elif isinstance(result, ScoringError):
                self._fail(lease, result)
            else:
                self._outages.ended(lease.kinds, self._clock())

    def _send(self, scored: Sequence[tuple[Lease, Scored]]) -> None:
        """Deliver labels together; where the replay refuses some of them, one by one."""
        if not scored:
            return
        try:
            self._client.label([each.labels for _, each in scored])
        except (RefusedError, WireError) as error:
            if len(scored) > 1:
                for one in scored:
                    self._send([one])
                return
            self._fail(scored[0][0], error)
            return
        for lease, each in scored:
            self._tally.count(lease.trajectory, each)

    def _fail(self, lease: Lease, error: ScoringError | RefusedError | WireError) -> None:
        logger.warning("trajectory %s was not scored: %s", lease.trajectory.id, error)
        self._client.scoring_failed(lease.trajectory.id, str(error))
        self._tally.count_failure("failed" if isinstance(error, ScoringError) else "refused")

    def _report(self) -> None:
        now = self._clock()
        values = self._tally.report(now)
        if "prm_agreement" in values and self._alarm.add(now, values["reward_mean"], values["prm_agreement"]):
            logger.warning(
                "the reward rises (%.3g) while process model and rules agree less and less (%.3g): the policy may be "
                "exploiting the process model; see docs/scoring.md, Guards",
                values["reward_mean"],
                values["prm_agreement"],
            )
        alarms = {"hack_alarm": float(self._alarm.ringing), "hack_alarms": float(self._alarm.count)}
        self._metrics.log(self._tally.labelled, values | alarms)


class _Background:
    """A thread that scores batches, one after another. It ends with the process."""

    def __init__(self, scorer: BatchScorer) -> None:
        self._scorer = scorer
        self._batches: queue.SimpleQueue[Sequence[Lease]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="scoring", daemon=True).start()

    def begin(self, leases: Sequence[Lease]) -> None:
        self._batches.put(leases)

    def results(self) -> list[Result]:
        """What is ready, in order; waits a moment for the first. Raises ScoringError: the thread died."""
        ready: list[Result] = []
        try:
            while True:
                result = self._results.get(timeout=POLL_S) if not ready else self._results.get_nowait()
                if result is None:
                    raise ScoringError("the scoring thread died; its traceback is above")
                ready.append(result)
        except queue.Empty:
            return ready

    def _run(self) -> None:
        try:
            while True:
                for result in self._scorer.score(self._batches.get()):
                    self._results.put(result)
        except Exception:
            logger.exception("the scoring thread died")
            self._results.put(None)
