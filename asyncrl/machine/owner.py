"""Finds the process that owns the folder of a run. A file in the folder has the owner's host and pid, and the owner
keeps the file locked."""

from __future__ import annotations

import errno
import fcntl
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

OWNER_FILE = "supervised"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns the folder of a run."""

    host: str
    pid: int


def owner_of(run_dir: Path) -> Owner | None:
    """Return the process that owns the folder, or None. A process on another host counts as the owner until it empties
    the file, as it does when it ends. Raises OSError: the file cannot be read, as in the folder of another user, or is
    damaged.
    """
    try:
        with (run_dir / OWNER_FILE).open() as lock:
            written = lock.read()
            owner = _named(written, run_dir / OWNER_FILE) if written else None
            if owner is not None and owner.host == socket.gethostname():
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return None
            return owner
    except (FileNotFoundError, NotADirectoryError):
        return None


def _named(written: str, path: Path) -> Owner:
    try:
        return msgspec.json.decode(written, type=Owner)
    except msgspec.DecodeError as error:
        raise OSError(errno.EIO, f"it names no process ({error})", str(path)) from error
