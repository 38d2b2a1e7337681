"""Directories whose owner may be killed: claimed while it lives, and removed by others once it has gone.

A claim is a file in the directory that its process keeps locked; the lock ends with the process, however that ends.
What holds: a directory is removed only where its lock is free, it was claimed on this host (on some shared file systems
others do not see the lock), and its last use is so long ago that no server can be at it any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from asyncrl.weights.folders import remove_folder

CLAIM = "owner"

logger = logging.getLogger(__name__)


class Claim:
    """This process's claim on `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: TextIO | None = None
        self._told = False

    def make(self) -> None:
        """Claim the directory, which is made where it is not there, unless that was done before."""
        try:
            self._file = self._file or _locked(self._directory / CLAIM)
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

    def end(self) -> None:
        """The directory has been removed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tell(self, text: str, error: OSError) -> None:
        """Once: it comes with every version."""
        if not self._told:
            logger.warning(text, self._directory, error)
        self._told = True


def remove_abandoned(parent: Path, unused_s: float) -> None:
    """Remove the directories under `parent` that were claimed on this host by processes which have gone, and that
    nobody began to use in the last `unused_s`."""
    for claim in parent.glob(f"*/{CLAIM}"):
        # Where it is locked, gone, or another user's, it is not ours to remove.
        with suppress(OSError), claim.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == _text() and time.time() - os.fstat(file.fileno()).st_mtime > unused_s:
                logger.info("removing %s, whose owner has gone", claim.parent)
                remove_folder(claim.parent)


def _locked(path: Path) -> TextIO:
    """The file of a claim, locked. Raises OSError: another process has it, or there are no locks here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise FileNotFoundError(f"{path} was removed meanwhile")
        file.truncate(0)
        file.write(_text())
        file.flush()
        stack.pop_all()
    return file


def _text() -> str:
    return f"claimed by a process of asyncrl on {socket.gethostname()}\n"
