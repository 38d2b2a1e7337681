"""Stops a rank whose main thread is in the middle of a long pass.

Before each pass and each update, the main threads of all ranks agree whether one of them was asked to stop
(`Ranks.stop_if`). A pass of a large model, or the compilation of its layers, may take longer than a stop is allowed to
take. So a helper thread waits for a while after a stop request, and then takes part in the next agreement in place of
the main thread. The main thread then never gets beyond this agreement.

All ranks stop at the same agreement, whichever thread takes part, so they count the same steps as finished. Weights
change only between an update's agreement and the end of its step, and the helper thread waits for that end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from asyncrl.config.exits import EXIT_FAILURE, EXIT_STOPPED
from asyncrl.errors import StoppedError

logger = logging.getLogger(__name__)

PATIENCE_S = 4.0
"""Seconds that the main thread has after a stop request to get to its next agreement. The rest of the time for a stop
(`machine.process.STOP_S`) is for ending the process."""
POLL_S = 0.1


class StopIf(Protocol):
    def __call__(self, stopped: bool, *, within_pass: bool = False) -> None: ...


class Stopping:
    """The state of this rank's stop, which the main thread and the helper thread share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """A thread holds this lock while it takes part in an agreement. A helper thread that takes part never releases
        it."""
        self.is_stopping = False
        self.is_updating = False
        """True if weights change, or the step that changed them is not yet counted as finished."""
        self.is_abrupt = False
        """True if the main thread of a rank is still within a pass. The ranks then cannot end their communication in
        order, and exit at once."""
        self.stop_if: StopIf | None = None
        """`Ranks.stop_if`. None until this rank has joined the other ranks."""
        self.save: Callable[[], None] = lambda: None
        """Saves the finished steps without reading the models, which are in the middle of a pass."""

    def updated(self) -> None:
        """Record that the step is counted as finished."""
        with self.lock:
            self.is_updating = False

    def end(self) -> None:
        """Record that the main thread can end without help from here on. Never returns if the helper thread ends the
        process.
        """
        with self.lock:
            self.is_stopping = True
            # These references would keep the models and the communication of the ranks alive in the helper thread.
            self.stop_if, self.save = None, lambda: None

    @contextmanager
    def watched(self, stop: threading.Event, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """End this process some seconds after `stop` is set, if the main thread has not left the block by then."""
        threading.Thread(target=self._watch, args=[stop, patience_s], name="stopping", daemon=True).start()
        try:
            yield
        finally:
            self.end()

    def _watch(self, stop: threading.Event, patience_s: float) -> None:
        stop.wait()
        # Gives the main thread time to stop by itself.
        threading.Event().wait(patience_s)
        while not self._ends_process():
            threading.Event().wait(POLL_S)

    def _ends_process(self) -> bool:
        """End the process, unless the main thread does. Returns False if an update must end first."""
        with self.lock:
            if self.is_stopping:
                return True
            if self.is_updating:
                return False
            status = EXIT_STOPPED
            try:
                self._stop_within_pass()
            except Exception:
                logger.exception("the finished steps are not saved")
                status = EXIT_FAILURE
            exit_now(status)
        return True

    def _stop_within_pass(self) -> None:
        if self.stop_if is None:
            return
        try:
            self.stop_if(True, within_pass=True)
        except StoppedError:
            logger.info("the running step is dropped, and the next start trains it again")
            self.save()
            self.stop_if(False)


def exit_now(status: int) -> None:
    """End the process at once, with all its threads. Does not wait for the GPU, and does not tell other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
