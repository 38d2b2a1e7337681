"""Collects the problems that checks find, so that one message shows all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from asyncrl.errors import AsyncrlError, ConfigError, DataError, StoppedError, UnavailableError


class Problems:
    """The problems that the checks have found. No check begins once `stop` is set."""

    def __init__(self, stop: threading.Event | None) -> None:
        self._found: list[AsyncrlError] = []
        self._stop = stop

    @property
    def any(self) -> bool:
        return bool(self._found)

    def extend(self, problems: Iterable[AsyncrlError]) -> None:
        self._found.extend(problems)

    def check(self, *checks: Callable[[], object]) -> None:
        """Run each check, and keep its problem if it has one. Raises StoppedError: `stop` was set."""
        for each in checks:
            with self.collected():
                each()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the problem that the block raises. Raises StoppedError: `stop` was set."""
        if self._stop is not None and self._stop.is_set():
            raise StoppedError("stopped while the configuration was checked; nothing was started")
        try:
            yield
        except (ConfigError, DataError, UnavailableError) as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise the first problem with the messages of all, if there are any."""
        if self._found:
            first = self._found[0]
            raise type(first)("\n".join(dict.fromkeys(map(str, self._found)))) from first
