"""Finds the errors in the logs of a run's roles. Errors that differ only in numbers count as one.

It also finds the roles that wait for room on a full disk. A role logs an error when such a wait begins. The wait ends
with a later line about the same file or folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from asyncrl.machine.files import DISK_IS_FULL
from asyncrl.network.throttle import LEFT_OUT
from asyncrl.runs.lines import LineFile, LineSpan, open_lines
from asyncrl.text import duration, shortened

LONGEST_ERROR = 300
MOST_KINDS = 100
"""The maximum number of different errors of a role that are kept. A log may have any text."""
MOST_BYTES = 64 << 20
"""The number of bytes at the end of a log that are searched when the log is read for the first time."""
RECENT_BYTES = 1 << 20
"""The number of these bytes for views that show only the newest errors."""
RECENT_S = 600.0
_LINE = rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ %s [\w.-]+: (.*)"
_ERROR = re.compile(_LINE % rb"(?:ERROR|CRITICAL)")
_OTHER = re.compile(_LINE % rb"(?:INFO|WARNING)")
_FULL = re.compile(rf"{re.escape(DISK_IS_FULL)}(.+) waits for room \(")
_NUMBER = re.compile(r"\d+")
_LEFT_OUT = re.compile(re.escape(LEFT_OUT).replace(r"\{\}", r"(\d+)"))


@dataclass(slots=True)
class RoleError:
    """An error of a role: its newest text, the number of times that the role logged it, and when it did so last, in
    seconds since 1970."""

    role: str
    text: str
    count: int = 0
    at: float = 0.0

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.role}: {self.text}{times}"

    def aged(self, now: float) -> str:
        """The error with its age at `now`, in seconds since 1970."""
        return f"{self}, {duration(max(0.0, now - self.at))} ago"


@dataclass(frozen=True, slots=True)
class RoomWait:
    """A role waits for room on a disk to write `what`. The wait began at `since`, in seconds since 1970."""

    role: str
    what: str
    since: float


class RoleErrors:
    """The errors in the logs of a run's folder. Each byte is read once, and an unchanged log is not opened.

    When a log is read for the first time, only its last `most_bytes` are read. With `from_now`, the
    errors that are in the logs when this object is made are left out, since they are from an earlier start.
    """

    def __init__(self, run_dir: Path, from_now: bool = False, most_bytes: int = MOST_BYTES) -> None:
        self._logs, self._most_bytes = run_dir / "logs", most_bytes
        self._found: dict[tuple[str, str], RoleError] = {}
        self._waits: dict[str, RoomWait] = {}
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

    def rows(self) -> list[tuple[str, str]]:
        """The row of the console with the number of errors of each role; no row without errors."""
        counts = ", ".join(f"{count} of {name}" for name, count in self.by_role().items())
        return [("errors", counts)] if counts else []

    def new_texts(self) -> list[str]:
        """Read the logs, and return a line for the console for each error of a new kind."""
        return [f"error of {found}; see {self._logs / found.role}.log" for found in self.read()]

    def waits_since(self, begin: float) -> list[RoomWait]:
        """The roles that wait for room on a disk. `begin` is the start of the run: an earlier wait has ended."""
        return [wait for wait in self._waits.values() if wait.since >= begin]

    def newest(self, begin: float, now: float) -> list[RoleError]:
        """The errors since `begin`, the start of the run, that a role logged in the last RECENT_S before `now`. An
        error about a full disk also counts for as long as the role waits for room."""
        waiting = {wait.role for wait in self.waits_since(begin)}
        return [
            error
            for error in self._found.values()
            if error.at >= begin
            and (now - error.at <= RECENT_S or (error.role in waiting and _FULL.match(error.text) is not None))
        ]

    def read(self) -> list[RoleError]:
        """Read what was added to the logs since the last call, and return the errors of kinds that are new."""
        before = set(self._found)
        for path in sorted(self._logs.glob("*.log")):
            # A log that was deleted just now, or that belongs to another user, is left out.
            with suppress(OSError):
                if not self._has_more(path):
                    continue
                with open_lines(path) as file:
                    for text, at in self._errors(path, file) if file is not None else ():
                        left_out = _LEFT_OUT.search(text)
                        self._count(path.stem, _LEFT_OUT.sub("", text), at, 1 + int(left_out[1] if left_out else 0))
        return [error for kind, error in self._found.items() if kind not in before]

    def _has_more(self, path: Path) -> bool:
        seen, status = self._read.get(path.name), path.stat()
        return seen is None or (seen.file, seen.end) != (status.st_ino, status.st_size)

    def _errors(self, log: Path, file: LineFile) -> Iterator[tuple[str, float]]:
        """The texts and the times of the errors that were added to a log."""
        seen = self._read.get(log.name)
        span = file.since(seen.file, seen.end) if seen else file.newest_bytes(self._most_bytes)
        self._read[log.name] = span
        for line in file.lines(span):
            if (error := _ERROR.match(line)) is not None:
                text, at = error[2].decode(errors="replace"), _seconds(error[1])
                if (full := _FULL.match(text)) is not None:
                    self._waits[log.stem] = RoomWait(log.stem, full[1], at)
                yield shortened(text, LONGEST_ERROR), at
            elif log.stem in self._waits:
                self._end_wait(log.stem, line)

    def _end_wait(self, role: str, line: bytes) -> None:
        """End the wait of a role if the line says that the file or folder is written."""
        said = _OTHER.match(line)
        if said is not None and said[2].decode(errors="replace").startswith(f"{self._waits[role].what} is "):
            del self._waits[role]

    def _count(self, role: str, text: str, at: float, times: int) -> None:
        kind = role, _NUMBER.sub("#", text)
        if kind not in self._found:
            if self._kinds[role] == MOST_KINDS:
                return
            self._kinds[role] += 1
        error = self._found.setdefault(kind, RoleError(role, text))
        error.text, error.count, error.at = text, error.count + times, at


def _seconds(stamp: bytes) -> float:
    """The time of a line, in seconds since 1970; 0 for a time that does not exist."""
    with suppress(ValueError, OverflowError):
        return datetime.strptime(stamp.decode(), "%Y-%m-%d %H:%M:%S").timestamp()
    return 0.0
