"""Runs a sink in another thread, so that a service that is slow or cannot be reached delays no role."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.observe.metrics import TRAINED_EPISODES, Failures, Histogram, LoggedEpisode, Sink, Value

logger = logging.getLogger(__name__)

WAITING_CALLS = 1000
"""The maximum number of calls that wait. If a row is logged every few seconds, this is enough for an hour without the
service."""
WAITING_TEXT = 50
"""The limit for samples of episodes, whose texts take much memory: they are dropped while this many calls wait."""
CLOSE_S = 8.0
UPLOAD_S = 3600.0
"""The maximum number of seconds that the learner waits at its end if the sink has a model to upload."""

_Call = Callable[[Sink], None]


class Background(Sink):
    """Passes calls on to `sink` in their order, from a thread.

    At most `limit` calls wait, and further ones are dropped. `lost` counts these calls, and the calls in which the sink
    raised an error. `close` waits at most `close_s` seconds for all waiting calls, or `upload_s` seconds if there is a
    model to upload. Then it abandons a sink that has not finished, and counts the remaining calls as lost.
    """

    def __init__(
        self, sink: Sink, limit: int = WAITING_CALLS, close_s: float = CLOSE_S, upload_s: float = UPLOAD_S
    ) -> None:
        self._sink = sink
        self._limit = limit
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._patience_s, self._upload_s = close_s, upload_s
        self._raised = Failures()
        self._dropped = 0
        self._ends_at: float | None = None
        self._closed = False
        # A daemon, so that a call that never returns does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"sink-{type(sink).__name__}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:  # type: ignore[override]
        return self._dropped + self._raised.count + self._sink.lost

    def resumed(self, step: int) -> None:
        self._enqueue(lambda sink: sink.resumed(step))

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._enqueue(lambda sink: sink.log(step, values))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._enqueue(lambda sink: sink.histograms(step, histograms))

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        self._enqueue(lambda sink: sink.episodes(step, episodes, table), min(self._limit, WAITING_TEXT))

    def model(self, step: int, folder: Path) -> None:
        self._patience_s = self._upload_s
        self._enqueue(lambda sink: sink.model(step, folder))

    def end(self) -> None:
        if self._ends_at is None:
            self._ends_at = time.monotonic() + self._patience_s
            self._calls.put(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.end()
        self._thread.join(max(0.0, (self._ends_at or 0.0) - time.monotonic()))
        if self._thread.is_alive():
            # The size of the queue is the number of lost calls. It lacks the call that hangs, which has left the queue,
            # but it counts the `None` at the end, which is not a call.
            left = self._calls.qsize()
            self._dropped += left
            name = type(self._sink).__name__
            logger.warning(
                "%s hangs: %d waiting calls are lost, because they were not done within %g s",
                name,
                left,
                self._patience_s,
            )
            self._sink.abandon()

    def _enqueue(self, call: _Call, limit: int | None = None) -> None:
        if self._calls.qsize() < (limit or self._limit):
            self._calls.put(call)
            return
        if not self._dropped:
            logger.warning(
                "metrics are lost: %s is slow; metrics/lost counts its lost calls", type(self._sink).__name__
            )
        self._dropped += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._raised.catch(self._sink, _staying(call))
        self._raised.catch(self._sink, _staying(lambda sink: sink.close()))


def _staying(call: _Call) -> _Call:
    """Wrap a call so that SystemExit becomes a RuntimeError: SystemExit would end the thread without a message."""

    def made(sink: Sink) -> None:
        try:
            call(sink)
        except SystemExit as error:
            raise RuntimeError(f"it tried to end the process: {error}") from error

    return made
