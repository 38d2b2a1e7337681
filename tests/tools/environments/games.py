"""Environments for tests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

TASK_ROW = {"secret": 42}


class Counter:
    """Sums what it is told; each object counts for itself."""

    closed: ClassVar[list[Counter]] = []

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.total = 0

    def reset(self, start: int = 0) -> str | None:
        self.threads.add(threading.get_ident())
        self.total = start
        return f" (from {start})" if start else None

    def add(self, number: int, times: int = 1) -> int:
        """Adds a number.

        Args:
            number: what to add
            times: how often
        """
        self.threads.add(threading.get_ident())
        if number < 0:
            raise ValueError("only upwards")
        self.total += number * times
        return self.total

    async def read(self) -> str:
        """Tells the sum."""
        await asyncio.sleep(0)
        return f"sum {self.total}"

    def get_reward(self) -> float:
        assert len(self.threads | {threading.get_ident()}) == 1
        return float(self.total)

    def _close(self) -> None:
        Counter.closed.append(self)


class Steps(Counter):
    """Rewards each call with the number that it added. `read` has no reward."""

    gain: Any = None

    def add(self, number: int, times: int = 1) -> int:
        """Adds a number.

        Args:
            number: what to add
            times: how often
        """
        before = self.total
        total = super().add(number, times)
        self.gain = total - before if number < 100 else "much"
        return total

    async def get_call_reward(self) -> Any:
        gain, self.gain = self.gain, None
        return gain


class Quiet:
    """Has neither tools nor a reward."""

    def reset(self, **row: Any) -> None:
        self.row = row


class AsyncReward:
    """A coroutine scores it, and its row is kept."""

    rows: ClassVar[list[dict[str, Any]]] = []

    async def reset(self, **row: Any) -> str:
        AsyncReward.rows.append(row)
        return "!"

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


class Hanging:
    """An environment whose call waits for `release`."""

    release: ClassVar[threading.Event] = threading.Event()

    def reset(self) -> None: ...

    def wait(self) -> str:
        """Waits."""
        self.release.wait(60)
        return "late"


class FailingReset:
    """Begins at the third attempt."""

    left: ClassVar[list[int]] = []

    def reset(self) -> None:
        if self.left:
            self.left.pop()
            raise OSError("no room")


class NoNumber:
    def reset(self) -> None: ...

    def get_reward(self) -> Any:
        return None


class Ending:
    """An environment whose tool would end the program."""

    def reset(self) -> None: ...

    def leave(self) -> str:
        """Leaves."""
        raise SystemExit(3)

    def stop(self) -> str:
        """Stops."""
        raise StopIteration


class Unhinted:
    def reset(self) -> None: ...

    def move(self, where):  # type: ignore[no-untyped-def]
        """Moves."""


class NoReset:
    def move(self) -> str:
        """Moves."""
        return "moved"


class NeedsArguments:
    def __init__(self, size: int) -> None: ...

    def reset(self) -> None: ...


class _Odd:
    """An error. Its text is the name of the thread that makes the text, or it has none."""

    def __init__(self, text: bool) -> None:
        self._text = text

    def __str__(self) -> str:
        if not self._text:
            raise RuntimeError("no text")
        return threading.current_thread().name

    __repr__ = __str__


class OddResults:
    """An environment that returns objects with code of the user."""

    def __init__(self) -> None:
        self.reward: Any = 0.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")

    def reset(self, reward: str = "") -> None:
        self.reward = {"odd": _Odd(False), "huge": 10**400}.get(reward, 0.0)

    def odd(self, text: bool) -> Any:
        """Returns an object.

        Args:
            text: whether it has a text
        """
        return _Odd(text)

    def hidden(self) -> Any:
        """Returns a coroutine, though a decorator hides that."""

        async def hidden() -> str:
            return "awaited"

        return hidden()

    def get_reward(self) -> Any:
        return self.reward


class NeedsField(Counter):
    def reset(self, level: int) -> str:  # type: ignore[override]
        return f"level {level}"


class Forgetful(Counter):
    def look(self) -> None:
        """Looks around."""


class EndsAtReward(Counter):
    def get_reward(self) -> float:
        raise SystemExit(4)
