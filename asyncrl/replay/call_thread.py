"""One thread that works for another, one call at a time.

A replay hands each of its turns over twice. With futures of the standard library a hand-over costs more processor time
than small requests do; two queues cost a third of that.
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
    """Calls `work` in a thread called `name`, until a `with` block ends. `busy`: a call has begun, and its result was
    not taken yet."""

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
        """Begin a call; none may be under way."""
        assert not self.busy
        self.busy = True
        self._calls.put((argument,))

    def result(self, timeout_s: float | None = None) -> Out | None:
        """The result of the call; None: it is not there within `timeout_s`. Raises what the call has raised."""
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
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that takes the result
                self._results.put((None, error))
