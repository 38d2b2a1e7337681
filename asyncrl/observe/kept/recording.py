"""Writes kept episodes in another thread: training never waits for a disk, and a disk's error never ends the run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import AsyncrlError
from asyncrl.observe.kept.episode import KeptStep
from asyncrl.observe.kept.format import FOLDER
from asyncrl.observe.kept.writing import KeptWriter

logger = logging.getLogger(__name__)

WAITING_STEPS = 2
"""The maximum number of samples that may wait for the disk. Further samples are lost."""
CLOSE_S = 5.0


class KeptRecorder:
    """Writes samples into `folder` of the run's folder `run_dir`, in a thread. They take at most `max_bytes` there.
    After each sample the thread calls `then` with it.

    All failures are counted, and only the first one is logged. `KeptWriter` opens the folder at the first
    sample, and again after a failure.
    """

    def __init__(
        self,
        run_dir: Path,
        max_bytes: int,
        then: Callable[[KeptStep], None] | None = None,
        folder: str = FOLDER,
    ) -> None:
        self._folder = folder
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._then = then
        self._writer: KeptWriter | None = None
        self._queue: queue.Queue[Callable[[], KeptStep] | None] = queue.Queue(WAITING_STEPS)
        self._left_out = self._lost = self._thinned = self._episodes = 0
        self._bytes = 0.0
        self._thread = threading.Thread(target=self._run, name="kept-episodes", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], KeptStep]) -> None:
        """Keep the sample that `make` returns when the thread calls it. Returns at once, and raises nothing."""
        try:
            self._queue.put_nowait(make)
        except queue.Full:
            self.lose("the disk is slower than the steps")

    def leave_out(self, groups: int) -> None:
        """Count groups that are too large to be kept."""
        self._left_out += groups

    def lose(self, reason: object) -> None:
        """Count a step whose sample is lost."""
        if not self._lost:
            logger.warning("the episodes of a step are not kept: %s; kept/lost counts further steps", reason)
        self._lost += 1

    def values(self) -> dict[str, float]:
        """The metrics of the kept episodes; docs/metrics.md lists them."""
        return {
            "kept/episodes": float(self._episodes),
            "kept/bytes": self._bytes,
            "kept/thinned": float(self._thinned),
            "kept/left_out": float(self._left_out),
            "kept/lost": float(self._lost),
        }

    def close(self) -> None:
        """Write the waiting samples. This waits at most `CLOSE_S` seconds for room in the queue, and at most as long
        again for the thread."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                kept = make()
                self._write(kept)
                if self._then is not None:
                    self._then(kept)
            except (AsyncrlError, OSError) as error:
                self._failed(error)
            except Exception as error:
                logger.exception("the episodes of a step are not kept")
                self._failed(error)

    def _write(self, kept: KeptStep) -> None:
        if self._writer is None:
            self._writer = KeptWriter(self._run_dir, self._max_bytes, self._folder)
        before = self._writer.thinned
        self._writer.add(kept)
        self._episodes += len(kept.episodes)
        self._thinned += self._writer.thinned - before
        self._bytes = float(self._writer.bytes)

    def _failed(self, error: Exception) -> None:
        # The next sample opens the folder again, because somebody may have replaced it to make room on the disk.
        self._writer = None
        self.lose(error)
