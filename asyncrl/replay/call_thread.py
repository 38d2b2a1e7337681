"""A helper thread that runs one call at a time.

The replay server passes each batch of requests to this thread, and gets the result back. Futures of the standard
library would take more processor time for this than a small request itself takes. Two queues take a third of that time.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Generic, Self, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class CallThread(Generic[In, Out]):
    """Calls `work` in a thread called `name`, until the `with` block ends. `busy` is true from `begin` until `result`
    has returned the result."""

    def __init__(self, work: Callable[[In], Out], name: str) -> None:
        self._work = work
        self._calls: SimpleQueue[tuple[In] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Out | None, BaseException | None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name)
        self.busy = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.put(None)
        self._thread.join()

    def begin(self, argument: In) -> None:
        """Begin a call. No other call may be running."""
        assert not self.busy
        self.busy = True
        self._calls.put((argument,))

    def result(self, timeout_s: float | None = None) -> Out | None:
        """The result of the call. `None` if it is not ready within `timeout_s`. Raises the exception of the call."""
        try:
            result, error = self._results.get(timeout=timeout_s)
        except Empty:
            return None
        self.busy = False
        if error is not None:
            raise error
        return result

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._results.put((self._work(*call), None))
            except BaseException as error:  # noqa: BLE001 - `result` raises it
                self._results.put((None, error))
