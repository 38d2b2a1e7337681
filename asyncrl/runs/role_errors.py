"""Finds the errors in the logs of a run's roles. Errors that differ only in numbers count as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.runs.lines import LineFile, LineSpan, open_lines
from asyncrl.text import shortened

LONGEST_ERROR = 300
MOST_KINDS = 100
"""The maximum number of different errors of a role that are kept. A log may have any text."""
MOST_BYTES = 64 << 20
"""The number of bytes at the end of a log that are searched when the log is read for the first time."""
_ERROR = re.compile(rb"\d{4}-\d\d-\d\d [\d:,]+ (?:ERROR|CRITICAL) [\w.-]+: (.*)")
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class RoleError:
    """An error of a role: its newest text, and how often the role logged it."""

    role: str
    text: str
    count: int = 0

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.role}: {self.text}{times}"


class RoleErrors:
    """The errors in the logs of a run's folder. Each byte is read once, and an unchanged log is not opened.

    With `from_now`, the errors that are in the logs when this object is made are left out, since they are from an
    earlier start.
    """

    def __init__(self, run_dir: Path, from_now: bool = False) -> None:
        self._logs = run_dir / "logs"
        self._found: dict[tuple[str, str], RoleError] = {}
        self._kinds: Counter[str] = Counter()
        self._read: dict[str, LineSpan] = {}
        for path in self._logs.glob("*.log") if from_now else ():
            with suppress(OSError), open_lines(path) as file:
                if file is not None:
                    self._read[path.name] = file.whole

    @property
    def all(self) -> list[RoleError]:
        """All errors so far, the first one first."""
        return list(self._found.values())

    def by_role(self) -> dict[str, int]:
        """The number of errors of each role that has any."""
        counts: Counter[str] = Counter()
        for error in self._found.values():
            counts[error.role] += error.count
        return dict(counts)

    def read(self) -> list[RoleError]:
        """Read what was added to the logs since the last call, and return the errors of kinds that are new."""
        before = set(self._found)
        for path in sorted(self._logs.glob("*.log")):
            # A log may go away, or belong to another user. The run goes on without it.
            with suppress(OSError):
                if not self._has_more(path):
                    continue
                with open_lines(path) as file:
                    for text in self._errors(path.name, file) if file is not None else ():
                        self._count(path.stem, text)
        return [error for kind, error in self._found.items() if kind not in before]

    def _has_more(self, path: Path) -> bool:
        seen, status = self._read.get(path.name), path.stat()
        return seen is None or (seen.file, seen.end) != (status.st_ino, status.st_size)

    def _errors(self, name: str, file: LineFile) -> Iterator[str]:
        """The texts of the errors that were added to a log."""
        seen = self._read.get(name)
        span = file.since(seen.file, seen.end) if seen else file.newest_bytes(MOST_BYTES)
        self._read[name] = span
        for line in file.lines(span):
            if (error := _ERROR.match(line)) is not None:
                yield shortened(error[1].decode(errors="replace"), LONGEST_ERROR)

    def _count(self, role: str, text: str) -> None:
        kind = role, _NUMBER.sub("#", text)
        if kind not in self._found:
            if self._kinds[role] == MOST_KINDS:
                return
            self._kinds[role] += 1
        error = self._found.setdefault(kind, RoleError(role, text))
        error.text, error.count = text, error.count + 1
