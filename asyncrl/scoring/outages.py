"""Kinds of scores whose service is away: asked again after pauses that grow, and nothing is lost meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.errors import ScoringError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0

logger = logging.getLogger(__name__)


class AwayError(ScoringError):
    """Who gives the scores of `kind` cannot be reached, which is no fault of the episode."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(slots=True)
class _Outage:
    since: float
    pause: float
    until: float


class Outages:
    """Which kinds to leave alone for now. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._outages: dict[str, _Outage] = {}

    def within_reach(self, kinds: Iterable[str], now: float) -> list[str]:
        """Those of `kinds` that may be asked for."""
        return [kind for kind in kinds if kind not in self._outages or now >= self._outages[kind].until]

    def began(self, away: AwayError, now: float) -> None:
        """A kind was asked for in vain: leave it alone for a pause, twice as long as the last one. Within a pause this
        is no news."""
        outage = self._outages.setdefault(away.kind, _Outage(now, FIRST_PAUSE_S / 2, now))
        if now < outage.until:
            return
        outage.pause = min(2 * outage.pause, LONGEST_PAUSE_S)
        outage.until = now + outage.pause
        logger.warning(
            "%s cannot be reached since %.0f s: its trajectories wait, and it is asked again in %.0f s (%s)",
            away.kind,
            now - outage.since,
            outage.pause,
            away,
        )

    def ended(self, kinds: Sequence[str], now: float) -> None:
        """These kinds gave scores."""
        for kind in self._outages.keys() & set(kinds):
            logger.warning("%s is back after %.0f s", kind, now - self._outages.pop(kind).since)
