"""Directories whose owner may be killed: claimed while it lives, and removed by others once it has gone.

A claim is a file in the directory that its process keeps locked; the lock ends with the process, however that ends.
What holds: a directory is removed only where its claim is free, it was claimed on this host (on some shared file
systems others do not see the lock), and its last use is so long ago that no server can be at it any more. Its claim
goes last, so that what somebody leaves who is killed meanwhile is removed as well.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

CLAIM = "owner"
PROBES_S = 1.0
"""Others that look whether an owner lives hold the lock for a moment."""
PROBE_S = 0.02

logger = logging.getLogger(__name__)


class Claim:
    """This process's claim on `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: TextIO | None = None
        self._told = False

    def make(self, patience_s: float = PROBES_S) -> None:
        """Claim the directory, which is made where it is not there, unless that was done before.

        Where it cannot be claimed, that is told, and it is used all the same. Raises BlockingIOError: another process
        has claimed it, and still lives after `patience_s`.
        """
        try:
            self._file = self._file or _lock_soon(self._directory / CLAIM, patience_s)
        except BlockingIOError:
            raise
        except OSError as error:
            self._tell("%s cannot be claimed, and stays if this process is killed: %s", error)
        self.use()

    def use(self) -> None:
        """A directory that is claimed is about to be used by somebody who may outlive this process."""
        if self._file is None:
            return
        try:
            os.utime(self._file.fileno())
        except OSError as error:
            self._tell("that %s is in use cannot be told, if this process is killed it may go early: %s", error)

    def remove(self) -> None:
        """Remove the directory and end the claim."""
        with suppress(OSError):
            _remove(self._directory)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tell(self, text: str, error: OSError) -> None:
        """Once: it comes with every version."""
        if not self._told:
            logger.warning(text, self._directory, error)
        self._told = True


def unused_s(directory: Path) -> float:
    """For how many seconds nobody has begun to use a directory; for ever where it was not claimed."""
    try:
        return time.time() - (directory / CLAIM).stat().st_mtime
    except OSError:
        return math.inf


def remove_abandoned(parent: Path, load_s: float) -> None:
    """Remove the directories under `parent` that were claimed on this host by processes which have gone, and that
    nobody began to use in the last `load_s`."""
    for claim in parent.glob(f"*/{CLAIM}"):
        # Where it is locked, gone, or another user's, it is not ours to remove.
        with suppress(OSError), claim.open("r+") as file:
            _lock(claim, file)
            if file.read() == _text() and unused_s(claim.parent) > load_s:
                logger.info("removing %s, whose owner has gone", claim.parent)
                _remove(claim.parent)


def _lock_soon(path: Path, patience_s: float) -> TextIO:
    """The file of a claim, locked. Raises OSError: there are no locks here, or BlockingIOError: another has it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _claimed(path)
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
        time.sleep(PROBE_S)


def _claimed(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("a+"))
        _lock(path, file)
        file.truncate(0)
        file.write(_text())
        file.flush()
        stack.pop_all()
    return file


def _lock(path: Path, file: TextIO) -> None:
    """Lock `file`, which was opened at `path`. Raises OSError: another has it, or it has been removed meanwhile."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
        raise FileNotFoundError(f"{path} was removed meanwhile")


def _remove(directory: Path) -> None:
    """Remove a claimed directory, its claim last. It is renamed first: its name is free at once. Raises OSError."""
    aside = directory.with_name(f".{directory.name}.removed")
    directory.rename(aside)
    for each in aside.iterdir():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        elif each.name != CLAIM:
            each.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def _text() -> str:
    return f"claimed by a process of asyncrl on {socket.gethostname()}\n"
