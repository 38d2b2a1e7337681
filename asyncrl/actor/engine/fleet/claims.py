"""Directories whose owner may be killed: claimed while it lives, and removed by others once it has gone.

A claim is a file in the directory that its process keeps locked; the lock ends with the process, however that ends. It
says who made it: a run, and a host.
What holds: a directory is removed only where its claim is free, it was claimed by this run on this host (on some shared
file systems others do not see the lock), and its last use is so long ago that no server can be at it any more. Of what
is in it only the run's own versions go (see weights/folders.py); with anything else it stays. Its claim goes last, so
that what somebody leaves who is killed meanwhile is removed as well.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from asyncrl.errors import ConfigError
from asyncrl.types import RunIdentity
from asyncrl.weights.folders import remove_all

CLAIM = "owner"
PROBES_S = 1.0
"""Others that look whether an owner lives hold the lock for a moment."""
PROBE_S = 0.02

logger = logging.getLogger(__name__)


class Claim:
    """This process's claim on `directory`, for `run`."""

    def __init__(self, directory: Path, run: RunIdentity) -> None:
        self._directory = directory
        self._run = run
        self._file: TextIO | None = None
        self._made = False
        self._told = False

    def make(self, patience_s: float = PROBES_S) -> None:
        """Claim the directory, which is made where it is not there, unless that was done before.

        Where it cannot be claimed, that is logged, and it is used all the same. Raises ConfigError: another process
        has claimed it, and still lives after `patience_s`; or it is another run's.
        """
        try:
            self._file = self._file or _lock_soon(self._directory / CLAIM, self._run, patience_s)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self._directory} belongs to another actor of this name, which runs; "
                "stop it, or choose another run.name and weights.dir"
            ) from error
        except OSError as error:
            self._tell("%s cannot be claimed, and stays if this process is killed: %s", error)
        self._made = True
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
        """Remove the run's versions, the directory where nothing else is in it, and end the claim, if it was made."""
        if not self._made:
            return
        with suppress(OSError):
            _remove(self._directory, self._run)
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


def remove_abandoned(parent: Path, run: RunIdentity, load_s: float) -> None:
    """Remove the directories under `parent` that were claimed on this host by processes of `run` which have gone, and
    that nobody began to use in the last `load_s`."""
    for claim in parent.glob(f"*/{CLAIM}"):
        # Where it is locked, gone, or another user's, it is not ours to remove.
        with suppress(OSError), claim.open("r+") as file:
            _lock(claim, file)
            owner, host = _read(file)
            ours = owner is not None and owner.may_be(run)
            if ours and host == socket.gethostname() and unused_s(claim.parent) > load_s:
                logger.info("removing %s, whose owner has gone", claim.parent)
                _remove(claim.parent, run)


def _lock_soon(path: Path, run: RunIdentity, patience_s: float) -> TextIO:
    """The file of a claim, locked. Raises OSError: there are no locks here, or BlockingIOError: another has it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _claimed(path, run)
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
        time.sleep(PROBE_S)


def _claimed(path: Path, run: RunIdentity) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("a+"))
        _lock(path, file)
        file.seek(0)
        owner, _ = _read(file)
        if owner is not None and not owner.may_be(run):
            raise ConfigError(
                f"{path.parent} belongs to an actor of run {owner}, not of {run}; if that run is over, remove it, else "
                "choose another run.name and weights.dir"
            )
        file.truncate(0)
        file.write(json.dumps({"run": run.name, "id": run.id, "host": socket.gethostname()}))
        file.flush()
        stack.pop_all()
    return file


def _lock(path: Path, file: TextIO) -> None:
    """Lock `file`, which was opened at `path`. Raises OSError: another has it, or it has been removed meanwhile."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
        raise FileNotFoundError(f"{path} was removed meanwhile")


def _remove(directory: Path, run: RunIdentity) -> None:
    """Remove the versions of `run` in a claimed directory, then its claim, and it as well if it is empty. Raises
    OSError."""
    remove_all(directory, run)
    (directory / CLAIM).unlink(missing_ok=True)
    directory.rmdir()


def _read(file: TextIO) -> tuple[RunIdentity | None, str]:
    """The run and the host in a claim; None where it says none: its maker was killed before it had written it."""
    try:
        match json.load(file):
            case {"run": str(name), "id": str(number), "host": str(host)}:
                return RunIdentity(name, number), host
    except ValueError:
        pass
    return None, ""
