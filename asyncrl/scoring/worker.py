"""A scorer at work: leases unlabelled trajectories, and returns for each its labels, or the reason why it has none.

A failure is never a reward of zero: the replay gives the trajectory out again, and after too many failures sets it
aside and counts it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import RefusedError, ScoringError
from asyncrl.observe.metrics import Metrics
from asyncrl.scoring.needs import serves
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.tally import Tally
from asyncrl.types import Labels, Lease, Trajectory

REPORT_S = 5.0
RENEWALS_PER_LEASE = 4

logger = logging.getLogger(__name__)


class ScoringClient(Protocol):
    """The replay, as a scorer sees it. Every call waits until the replay has answered."""

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int) -> list[Lease]:
        """Trajectories to score, bounded by number and tokens; waits about a second for the first."""
        ...

    def renew(self) -> None:
        """Keep what is leased for another while."""
        ...

    def label(self, labels: Sequence[Labels]) -> None: ...

    def scoring_failed(self, trajectory_id: str, reason: str) -> None: ...


class Worker:
    """Scores until told to stop. `lease_s` is how long the replay waits for a silent scorer."""

    def __init__(
        self,
        client: ScoringClient,
        scorer: Scorer,
        config: ScoringConfig,
        metrics: Metrics,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._scorer = scorer
        self._config = config
        self._metrics = metrics
        self._renew_s = lease_s / RENEWALS_PER_LEASE
        self._clock = clock
        self._renewed = clock()
        self._tally = Tally(clock())

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set; what is then unfinished, the replay gives to others."""
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
        config = self._config
        leases = self._client.lease(serves(config), config.batch_trajectories, config.batch_tokens)
        episodes = [(lease.task, lease.trajectory) for lease in leases]
        self._renewed = self._clock()
        self._tally.waited(self._renewed - asked)
        for (_, trajectory), result in zip(episodes, self._scorer.score(episodes), strict=True):
            self._deliver(trajectory, result)
            if stop.is_set():
                return
            if self._clock() - self._renewed > self._renew_s:
                self._client.renew()
                self._renewed = self._clock()

    def _report(self) -> None:
        self._metrics.log(self._tally.labelled, self._tally.report(self._clock()))

    def _deliver(self, trajectory: Trajectory, result: Labels | ScoringError) -> None:
        if isinstance(result, Labels):
            try:
                self._client.label([result])
            except RefusedError as error:
                result = ScoringError(str(error))
            else:
                self._tally.count_label(trajectory, result)
                return
        logger.warning("trajectory %s was not scored: %s", trajectory.id, result)
        self._client.scoring_failed(trajectory.id, str(result))
        self._tally.count_failure()
