"""The request to stop, which every rank must follow at the same point."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from asyncrl.errors import StoppedError
from asyncrl.learner.ranks.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop. `event` is set if this rank got the request."""

    ranks: Ranks
    event: threading.Event

    def together(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call that may wait. Raises StoppedError on every rank if a rank is asked to stop before its call
        ends."""

        def answer() -> T:
            result = call(*args, **kwargs)
            self.check("asked to stop")
            return result

        return self.ranks.together(answer)

    def check(self, reason: str) -> None:
        """Raises StoppedError: this rank is asked to stop."""
        if self.event.is_set():
            raise StoppedError(reason)
