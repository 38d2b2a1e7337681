"""Notices that a run stands still, and then asks again and again whom it waits for, in a thread of its own: a replay
that hangs must not hold up whoever shows the answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

STILL_S = 30.0
"""A run stands still once nothing has changed for so long."""
LOOK_S = 5.0
"""Between two looks at a run that stands still."""


class Standstill:
    """`look` says whom the run waits for; it may take long and raise anything. `clock` gives seconds."""

    def __init__(self, look: Callable[[], str], clock: Callable[[], float]) -> None:
        self._look, self._clock = look, clock
        self._seen: Hashable = None
        self._since = clock()
        self._next = 0.0
        self._thread: threading.Thread | None = None
        self._text = ""
        self._failed = False

    def text(self, progress: Hashable) -> str:
        """Whom the run waits for, as the newest look found; empty while `progress` changes, and until a first look."""
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
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever is wrong with a look at it
            if not self._failed:
                log.warning("whom the run waits for cannot be said: %s", error)
            self._failed = True
