"""Notices that a run makes no progress, and then looks for the cause every few seconds.

The search runs in another thread, so that a replay that hangs does not block the terminal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

STILL_S = 30.0
"""A run makes no progress if its counters have not changed for this many seconds."""
LOOK_S = 5.0
"""The number of seconds between two looks at such a run."""


class Standstill:
    """Tells the cause of a standstill, which `look` finds. `look` may take long or raise any error. `clock` gives
    seconds."""

    def __init__(self, look: Callable[[], str], clock: Callable[[], float]) -> None:
        self._look, self._clock = look, clock
        self._seen: Hashable = None
        self._since = clock()
        self._next = 0.0
        self._thread: threading.Thread | None = None
        self._text = ""
        self._failed = False

    def text(self, progress: Hashable) -> str:
        """The cause that the newest look found. It is empty if `progress` has changed in the last STILL_S seconds, and
        until a first look has ended."""
        now = self._clock()
        if progress != self._seen:
            self._seen, self._since, self._text = progress, now, ""
        if now - self._since < STILL_S:
            return ""
        if now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + LOOK_S
            self._thread = threading.Thread(target=self._ask, args=(self._since,), name="standstill", daemon=True)
            self._thread.start()
        return self._text

    def close(self, wait_s: float = 10.0) -> None:
        """Wait for a look that has begun, for up to `wait_s` seconds."""
        if self._thread:
            self._thread.join(wait_s)

    def _ask(self, since: float) -> None:
        try:
            text = self._look()
            if since == self._since:
                self._text = text
        except Exception as error:  # noqa: BLE001 - an error in this look must not end the run
            if not self._failed:
                log.warning("cannot find out what the run waits for: %s", error)
            self._failed = True
