"""The alarm on reward hacking: the mean reward rises while process model and rules disagree more and more."""

from __future__ import annotations

from collections import deque

import numpy as np

from asyncrl.config.schema import GuardConfig

_LEAST_POINTS = 6


class HackAlarm:
    """Watches the trends of reward and agreement over a sliding window. Times are seconds of one monotonic clock."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._points: deque[tuple[float, float, float]] = deque()
        self.ringing = False
        self.count = 0

    def add(self, now: float, reward: float, agreement: float) -> bool:
        """Take the means of one report. True where the alarm begins with it; `ringing` says whether it goes on."""
        self._points.append((now, reward, agreement))
        while now - self._points[0][0] > self._config.window_s:
            self._points.popleft()
        rise, agreement_rise = self._changes()
        before, self.ringing = (
            self.ringing,
            rise >= self._config.reward_rise and agreement_rise <= -self._config.agreement_fall,
        )
        begins = self.ringing and not before
        self.count += begins
        return begins

    def _changes(self) -> tuple[float, float]:
        """How far the straight lines through both series rise over the window; 0 until it is half full."""
        times, rewards, agreements = np.array(self._points).T
        span = times[-1] - times[0]
        if len(times) < _LEAST_POINTS or span < self._config.window_s / 2:
            return 0.0, 0.0
        slopes = np.polyfit(times - times[0], np.stack([rewards, agreements], axis=1), 1)[0]
        return float(slopes[0] * span), float(slopes[1] * span)
