"""Makes temporary folders, and removes those that killed processes have left.

A process holds a lock on a file in its folder. The kernel frees the lock when the process dies, so a folder whose lock
is free belongs to no process.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

LOCK = "in_use.lock"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder whose name begins with `prefix`, and remove it at the end of the block.

    First remove the folders with this prefix that processes of this user have left. A folder without a lock is left
    alone: it may be new, or another function may have made it.
    """
    _remove_left(Path(tempfile.gettempdir()), prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The file gets its name only after it is locked, so that no other process finds it unlocked.
        lock = os.open(folder / "new.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # The file system may have no locks. Then the folder has no lock, and stays.
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / "new.lock").rename(folder / LOCK)
            yield folder
        finally:
            os.close(lock)


def _remove_left(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        # Another process may remove the same folder, or another user own it.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
