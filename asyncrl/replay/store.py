"""The store: LMDB tables that change together in one transaction, so that a crash leaves all of a change or none.

This is the ground of exactly once: a trajectory, its labels, its lease and its plan can never disagree.

Nothing of the replay's state lives elsewhere. `transaction.py` has what one transaction reads and writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from asyncrl.errors import StoreError
from asyncrl.replay import images
from asyncrl.replay.environment import ADVICE, OTHER_VERSION, clear_errors, open_environment
from asyncrl.replay.transaction import Transaction

TABLES = (
    "meta",  # counters and the store's identity
    "actors",  # worker -> incarnation
    "scorers",  # worker -> incarnation
    "pending",  # order -> ticket that waits for an actor
    "tickets",  # ticket -> TicketRecord
    "held",  # worker -> tickets that it holds (many)
    "groups",  # group -> GroupRecord
    "trajectories",  # trajectory -> TrajectoryRecord; kept for good, so that an id is never taken twice
    "data",  # trajectory -> frames
    "labels",  # trajectory -> frames
    "waiting",  # kind of scores, order -> trajectory that needs them next
    "leased",  # scorer -> trajectories it scores (many)
    "ready",  # order -> ReadyGroup: complete, labelled, may be trained
    "again",  # order -> row of a task that is to be run again before the feed continues
    "tasks",  # row -> [running success rate, epoch]
    "plans",  # step -> BatchPlan
    "dead",  # ticket -> DeadLetter
    "dead_by_age",  # order -> ticket of a dead letter
    "evaluations",  # policy version -> EvaluationRecord
    *images.TABLES,
)
MULTIPLE = ("held", "leased", *images.MULTIPLE)
FORMAT = 3
"""The number of the store's format: the tables, and the fields of their records. A store of another one is refused."""
READER_MAP_BYTES = 1 << 42
"""Address space only: a reader must see all that a writer may yet write."""

LOCK_FILE = "in-use"
"""The process that has the store open for writing holds a lock on this file."""
MADE = "made\n"
READERS_FILE = "lock.mdb"
"""LMDB's table of readers. Each reader writes itself into it, and a writer keeps the pages that it reads."""
ENDPOINT_FILE = "endpoint"
"""The address of the replay that serves the store, or served it last."""
RETRY_S = 0.01


class Store:
    """A store in a folder; `durable` makes every commit survive a power loss, not only a killed process. Each store has
    an identity of its own, which tells the replay of one run from that of another.

    Raises StoreError: the folder cannot be opened as a store, or another process still has it open after `patience_s`
    seconds, with the reason. So does any transaction, once the store turns out to be damaged.
    """

    def __init__(self, path: Path, max_bytes: int, durable: bool, patience_s: float = 1.0) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = (path / LOCK_FILE).open("a+")
        # A process that asks `in_use` holds the lock for a moment.
        give_up = time.monotonic() + patience_s
        while not _locked(self._lock, fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                self._lock.close()
                raise StoreError(f"the store {path} is open in another process; stop that one first")
            time.sleep(RETRY_S)
        file = path / "data.mdb"
        if self._was_made() and (not file.exists() or file.stat().st_size == 0):
            # LMDB would create an empty store, and the run would begin again.
            raise StoreError(f"{file} is missing or empty, but there was a store; {ADVICE}")
        self._environment, self._tables = open_environment(
            path, TABLES, MULTIPLE, map_size=max_bytes, sync=durable, metasync=durable
        )
        if not self._was_made():
            self._lock.write(MADE)
            self._lock.flush()
            os.fsync(self._lock.fileno())
        with _closed_on_error(self), self.transaction() as tx:
            if not tx.count("meta"):  # It is new.
                tx.put("meta", "identity", uuid.uuid4().hex)
                tx.set("format", FORMAT)
            _check_format(path, tx)

    @contextlib.contextmanager
    def transaction(self, write: bool = True) -> Iterator[Transaction]:
        """One transaction: committed when the block ends, undone when it raises. Bytes that a reading one gives are
        views of the file, and end with it."""
        begin = self._environment.begin
        with clear_errors(self.path), begin(write=True) if write else begin(buffers=True) as raw:
            tx = Transaction(self._environment, self._tables, raw)
            yield tx
            tx.flush()
        for effect in tx.effects:
            effect()

    def _was_made(self) -> bool:
        self._lock.seek(0)
        return self._lock.read() == MADE

    def close(self) -> None:
        self._environment.close()
        self._lock.close()


@contextlib.contextmanager
def _closed_on_error(store: Store | StoreReader) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        yield
        stack.pop_all()


def _check_format(path: Path, tx: Transaction) -> None:
    if (found := tx.counter("format")) != FORMAT:
        raise StoreError(f"the store {path} has format {found}, and this version reads {FORMAT}: {OTHER_VERSION}")


def in_use(path: Path) -> bool:
    """True if a process has the store in this folder open for writing. Writes nothing, so that a user who may only read
    the folder can call it.
    """
    try:
        with (path / LOCK_FILE).open() as lock:
            return not _locked(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _locked(file: IO[str], kind: int) -> bool:
    """Lock a file, if that is possible now. True if it is locked; closing the file ends the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class StoreReader:
    """A store opened for reading only, while another process may have it open for writing. A user who may not write
    LMDB's table of readers reads without it, and keeps writers away meanwhile.

    Raises StoreError: there is no store in the folder, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "data.mdb").is_file():
            raise StoreError(f"there is no store in {path}; name the replay folder of a run, such as runs/NAME/replay")
        self.path = path
        with contextlib.ExitStack() as stack:
            listed = os.access(path / READERS_FILE, os.W_OK)
            if not listed:
                stack.enter_context(_without_writers(path))
            self._environment, self._tables = open_environment(
                path, TABLES, MULTIPLE, map_size=READER_MAP_BYTES, readonly=True, lock=listed
            )
            self._alone = stack.pop_all()
        with _closed_on_error(self), self.transaction() as tx:
            _check_format(path, tx)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One view of the store, as it was at one moment."""
        with clear_errors(self.path), self._environment.begin() as raw:
            yield Transaction(self._environment, self._tables, raw)

    def close(self) -> None:
        self._environment.close()
        self._alone.close()


@contextlib.contextmanager
def _without_writers(path: Path) -> Iterator[None]:
    """Within the block no process opens the store in a folder for writing. Raises StoreError: one has it open."""
    try:
        lock = (path / LOCK_FILE).open()
    except FileNotFoundError:
        # A copy of a store: each writer makes this file first.
        yield
        return
    except OSError as error:
        raise StoreError(f"cannot open the store {path}: {error}") from error
    with lock:
        if not _locked(lock, fcntl.LOCK_SH):
            raise StoreError(
                f"the store {path} is in use, and only a user who may write {path / READERS_FILE} can read it meanwhile"
            )
        yield
