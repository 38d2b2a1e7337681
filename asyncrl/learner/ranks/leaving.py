"""How a rank leaves in the middle of a long pass when it is asked to stop.

The main thread asks before each pass and each update whether a rank was asked to stop, and then all ranks leave
together (`Ranks.leave_if`). A pass of a large model, and the compilation of its layers, may take longer than a stop
may. So a thread of the rank waits for a while, and then answers in the place of the main thread, which does not get on
from there any more. All ranks leave at the same of these questions, whoever answers, and so know the same steps as
done. No weight changes between two questions, except within an update, in which the thread does not answer.
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
"""For the main thread to get to its next question after a stop. The rest of STOP_S is left for the end."""
POLL_S = 0.1


class Ask(Protocol):
    def __call__(self, stopped: bool, *, within_pass: bool = False) -> None: ...


class Leaving:
    """Who answers for this rank, and what is left to do before it may end."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """Held by the thread that answers. Whoever answers for the main thread keeps it for ever."""
        self.is_leaving = False
        self.is_updating = False
        """Whether weights change, or the step that changed them is not yet counted as done."""
        self.is_abrupt = False
        """Whether the main thread of a rank is still within a pass, so that no rank can end its communication."""
        self.ask: Ask | None = None
        """`Ranks.leave_if`; None while this rank has not met the others."""
        self.keep: Callable[[], None] = lambda: None
        """Saves what was finished, without a look at the models, which are in the middle of a pass."""

    def updated(self) -> None:
        """The step is counted as done."""
        with self.turn:
            self.is_updating = False

    def end(self) -> None:
        """The main thread ends by itself from here on. Never returns while another thread answers for it."""
        with self.turn:
            self.is_leaving = True
            # Through these the thread that watches would keep the models and the communication of the ranks alive.
            self.ask, self.keep = None, lambda: None

    @contextmanager
    def watched(self, stop: threading.Event, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Within the block, end this process some seconds after `stop` is set, if the main thread does not leave."""
        threading.Thread(target=self._watch, args=[stop, patience_s], name="leaving", daemon=True).start()
        try:
            yield
        finally:
            self.end()

    def _watch(self, stop: threading.Event, patience_s: float) -> None:
        stop.wait()
        # The main thread may be within a call that keeps it from waking up.
        threading.Event().wait(patience_s)
        while not self._answers():
            threading.Event().wait(POLL_S)

    def _answers(self) -> bool:
        """Answer for the main thread, unless it leaves by itself. False: an update must end before."""
        with self.turn:
            if self.is_leaving:
                return True
            if self.is_updating:
                return False
            status = EXIT_STOPPED
            try:
                self._leave()
            except Exception:
                logger.exception("the steps that were done are not saved")
                status = EXIT_FAILURE
            exit_now(status)
        return True

    def _leave(self) -> None:
        if self.ask is None:
            return
        try:
            self.ask(True, within_pass=True)
        except StoppedError:
            logger.info("the step in work is left, and is done again by the next start")
            self.keep()
            self.ask(False)


def exit_now(status: int) -> None:
    """End the process, whatever its threads do. Nothing waits for a GPU, and nothing takes leave of other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
