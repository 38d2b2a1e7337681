"""Notices that a run makes no progress, and then asks again and again for the cause.

It asks in a thread of its own, so that a replay that hangs does not hold up the terminal that shows the answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

STILL_S = 30.0
"""A run makes no progress once nothing has changed for so long."""
LOOK_S = 5.0
"""The time between two looks at such a run."""


class Standstill:
    """`look` returns the cause of the wait; it may take long and raise anything. `clock` gives seconds."""

    def __init__(self, look: Callable[[], str], clock: Callable[[], float]) -> None:
        self._look, self._clock = look, clock
        self._seen: Hashable = None
        self._since = clock()
        self._next = 0.0
        self._thread: threading.Thread | None = None
        self._text = ""
        self._failed = False

    def text(self, progress: Hashable) -> str:
        """The cause of the wait, by the newest look; empty while `progress` changes, and until a first look."""
        now = self._clock()
        if progress != self._seen:
            self._seen, self._since, self._text = progress, now, ""
        if now - self._since < STILL_S:
            return ""
        if now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + LOOK_S
            self._thread = threading.Thread(target=self._ask, name="standstill", daemon=True)
            self._thread.start()
        return self._text

    def close(self, wait_s: float = 10.0) -> None:
        """Wait for a look that has begun, for up to `wait_s` seconds."""
        if self._thread:
            self._thread.join(wait_s)

    def _ask(self) -> None:
        try:
            self._text = self._look()
        except Exception as error:  # noqa: BLE001 - no fault of a look at a run ends the run
            if not self._failed:
                log.warning("whom the run waits for cannot be said: %s", error)
            self._failed = True
