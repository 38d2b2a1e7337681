"""The store: LMDB tables that change together in one transaction, so that a crash leaves all of a change or none.

Nothing of the replay's state lives elsewhere. Small records are msgpack, trajectories and labels are joined frames.
LMDB has no checksums of its own, so every value is sealed: what reads back otherwise than it was written, or under
another key, raises StoreError and is never taken for data.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import lmdb
from msgspec import DecodeError, msgpack
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.environment import ADVICE, UPGRADE, ReadSnapshot, clear_errors, open_environment, snapshots
from asyncrl.types import RunIdentity
from asyncrl.wire import Buffer

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
    "again",  # order -> row of a task that is to be run again before the feed goes on
    "tasks",  # row -> [running success rate, epoch]
    "plans",  # step -> BatchPlan
    "dead",  # ticket -> DeadLetter
    "dead_by_age",  # order -> ticket of a dead letter
    "evaluations",  # policy version -> EvaluationRecord
)
MULTIPLE = ("held", "leased")
FORMAT = 2
"""Format 1 had the tables of RENAMED under their old names, and no number."""
RENAMED = {"facts": "trajectories", "burials": "dead_by_age"}
MAX_KEY_BYTES = 500
FIRST_ORDER = 1 << 48
ORDER_BYTES = 8
READER_MAP_BYTES = 1 << 42
"""Address space only: a reader must see all that a writer may yet write."""

SEAL_BYTES = 8
LOCK_FILE = "in-use"
"""The process that has the store open for writing holds a lock on this file."""
MADE = "made\n"
ENDPOINT_FILE = "endpoint"
"""The address of the replay that serves the store, or served it last."""
RETRY_S = 0.01

Key = str | int | bytes
T = TypeVar("T")
P = ParamSpec("P")
_decoder: Callable[[Any], msgpack.Decoder[Any]] = functools.cache(msgpack.Decoder)


def _key(key: Key) -> bytes:
    if isinstance(key, str):
        key = key.encode()
    elif isinstance(key, int):
        key = key.to_bytes(8, "big")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise RefusedError(f"an id has {len(key)} bytes; 1 to {MAX_KEY_BYTES} are taken")
    return key


def _seal(key: bytes, value: bytes | memoryview) -> bytes:
    """XXH3 of a value and its key. It runs at memory speed; zlib's CRC-32 takes 20 times as long."""
    return xxh3_64_digest(value, xxh3_64_intdigest(key))


class Transaction:
    """Reads and writes of one transaction; values are plain msgpack values unless a method says bytes.

    Whatever reads a value raises StoreError where it is damaged. `writes` counts the changes that were tried. Counters
    are kept in memory and written once, by `flush`, since every request changes some.
    """

    def __init__(self, environment: lmdb.Environment, tables: dict[str, Any], raw: lmdb.Transaction) -> None:
        self._environment = environment
        self._tables = tables
        self._raw = raw
        self.writes = 0
        self._counters: dict[str, int] = {}
        self._changed: set[str] = set()
        self._live_bytes: int | None = None
        self.effects: list[Callable[[], object]] = []

    def afterwards(self, effect: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> None:
        """Call `effect`, a change of memory, once this transaction is committed; never if it is undone."""
        self.effects.append(partial(effect, *arguments, **options))

    def get(self, table: str, key: Key, kind: type[T]) -> T | None:
        """A value of type `kind`; None where there is none."""
        raw = _key(key)
        sealed = self._raw.get(raw, db=self._tables[table])
        return None if sealed is None else self._unpacked(table, raw, sealed, kind)

    def put(self, table: str, key: Key, value: Any) -> None:
        self.writes += 1
        raw, packed = _key(key), msgpack.encode(value)
        self._raw.put(raw, _seal(raw, packed) + packed, db=self._tables[table])

    def _unpacked(self, table: str, key: bytes, sealed: bytes | memoryview, kind: type[T]) -> T:
        value = self._unsealed(table, key, sealed)
        try:
            found: T = _decoder(kind).decode(value)
            return found
        except DecodeError as error:
            raise self._damaged(f"{table} of {key!r} is no {kind.__name__}: {error}") from error

    def get_bytes(self, table: str, key: Key) -> memoryview | None:
        raw = _key(key)
        value = self._raw.get(raw, db=self._tables[table])
        return None if value is None else self._unsealed(table, raw, value)

    def put_bytes(self, table: str, key: Key, *parts: Buffer) -> None:
        """Put a value that comes in parts, which are copied once."""
        self.writes += 1
        raw = _key(key)
        seal = xxh3_64(seed=xxh3_64_intdigest(raw))
        for part in parts:
            seal.update(part)
        self._raw.put(raw, b"".join((seal.digest(), *parts)), db=self._tables[table])

    def size(self, table: str, key: Key) -> int:
        """Bytes of a value, damaged or not; 0 where there is none."""
        value = self._raw.get(_key(key), db=self._tables[table])
        return 0 if value is None else len(value)

    def _unsealed(self, table: str, key: bytes, sealed: bytes | memoryview) -> memoryview:
        value = memoryview(sealed)[SEAL_BYTES:]
        if _seal(key, value) != sealed[:SEAL_BYTES]:
            raise self._damaged(f"{table} of {key!r} is not what was written")
        return value

    def present(self, value: T | None, table: str, key: Key) -> T:
        """A value that others refer to. Raises StoreError: it is gone."""
        if value is None:
            raise self._damaged(f"{table} of {key!r} is gone")
        return value

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._environment.path()}/data.mdb is damaged: {what}; {ADVICE}")

    def delete(self, table: str, key: Key) -> bool:
        self.writes += 1
        return bool(self._raw.delete(_key(key), db=self._tables[table]))

    def add_member(self, table: str, key: Key, member: str) -> None:
        """Add one of the many values that `key` has in a multiple table."""
        self.writes += 1
        self._raw.put(_key(key), _key(member), db=self._tables[table])

    def remove_member(self, table: str, key: Key, member: str) -> bool:
        """Remove one of the values of `key`; False where it was not there."""
        self.writes += 1
        return bool(self._raw.delete(_key(key), _key(member), db=self._tables[table]))

    def members(self, table: str, key: Key) -> list[str]:
        cursor = self._raw.cursor(db=self._tables[table])
        return [bytes(value).decode() for value in cursor.iternext_dup()] if cursor.set_key(_key(key)) else []

    def items(self, table: str, kind: type[T]) -> Iterator[tuple[bytes, T]]:
        """Keys, in order, with their values. The table may change meanwhile only at keys already seen."""
        for key, value in self._raw.cursor(db=self._tables[table]):
            yield bytes(key), self._unpacked(table, bytes(key), value, kind)

    def keys(self, table: str) -> Iterator[bytes]:
        """Keys, in order."""
        for key in self._raw.cursor(db=self._tables[table]).iternext(values=False):
            yield bytes(key)

    def page(self, table: str, after: str, count: int, prefix: str = "", backwards: bool = False) -> list[str]:
        """The next `count` keys that begin with `prefix`, in order, behind `after` or, if that is empty, from the first
        on. `backwards`: before `after` or from the last on."""
        cursor, begin = self._raw.cursor(db=self._tables[table]), prefix.encode()
        if backwards:
            behind = after.encode() or begin + b"\xff"  # No text has this byte.
            there = cursor.prev() if cursor.set_range(behind) else cursor.last()
            keys = cursor.iterprev(values=False)
        else:
            there = cursor.set_range(after.encode() + b"\0" if after else begin)
            keys = cursor.iternext(values=False)
        if not there:
            return []
        return [bytes(key).decode() for key in islice(takewhile(lambda key: bytes(key).startswith(begin), keys), count)]

    def holders(self, table: str) -> dict[str, int]:
        """The keys of a multiple table, and how many values each has."""
        cursor = self._raw.cursor(db=self._tables[table])
        return {bytes(key).decode(): int(cursor.count()) for key in cursor.iternext_nodup()}

    def count(self, table: str) -> int:
        return int(self._raw.stat(db=self._tables[table])["entries"])

    def append(self, table: str, value: Any, queue: str = "", urgent: bool = False) -> int:
        """Put `value` behind all others of a queue of an ordered table; urgent ones stand before all that are not.
        Returns its order there."""
        order = self.add(f"order/{table}/urgent") if urgent else FIRST_ORDER + self.add(f"order/{table}")
        self.put(table, queue.encode() + _key(order), value)
        return order

    def first(self, table: str, kind: type[T], queue: str = "") -> tuple[bytes, T] | None:
        """Key and value of the first entry of a queue of an ordered table."""
        cursor, prefix = self._raw.cursor(db=self._tables[table]), queue.encode()
        if not cursor.set_range(prefix + _key(0)):
            return None
        key = bytes(cursor.key())
        if len(key) != len(prefix) + ORDER_BYTES or not key.startswith(prefix):
            return None
        return key, self._unpacked(table, key, cursor.value(), kind)

    def counter(self, name: str) -> int:
        if name not in self._counters:
            self._counters[name] = self.get("meta", name, int) or 0
        return self._counters[name]

    def counters(self, prefix: str) -> dict[str, int]:
        """Every counter whose name begins with `prefix`."""
        self.flush()
        names = (key.decode() for key in self.keys("meta"))
        return {name: self.counter(name) for name in names if name.startswith(prefix)}

    def add(self, name: str, amount: int = 1) -> int:
        """Add to a counter; returns its new value."""
        return self.set(name, self.counter(name) + amount)

    def set(self, name: str, value: int) -> int:
        """Give a counter a value; returns it."""
        self.writes += 1
        self._counters[name] = value
        self._changed.add(name)
        return value

    def flush(self) -> None:
        """Write the counters that changed, and read them anew when they are asked for."""
        for name in self._changed:
            self.put("meta", name, self._counters[name])
        self._changed.clear()
        self._counters.clear()

    @property
    def identity(self) -> str | None:
        """The store's own name; None in one that was never opened for writing since stores have names."""
        return self.get("meta", "identity", str)

    @property
    def run(self) -> RunIdentity | None:
        """The run that the store belongs to; None where none has served it yet."""
        value = self.get("meta", "run", list[str])
        return None if value is None else RunIdentity(*value)

    def live_bytes(self) -> int:
        """Bytes of all pages that held something when the transaction first asked."""
        if self._live_bytes is None:
            self._live_bytes = sum(self.table_bytes(table) for table in self._tables)
        return self._live_bytes

    def table_bytes(self, table: str) -> int:
        """Bytes of the pages of one table."""
        stat = self._raw.stat(db=self._tables[table])
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def rename(self, names: Mapping[str, str]) -> None:
        """Move what tables of older names hold to those of their new names; those that are not there hold nothing."""
        for old, new in names.items():
            try:
                table = self._environment.open_db(old.encode(), txn=self._raw, create=False)
            except lmdb.NotFoundError:
                continue
            for key, value in self._raw.cursor(db=table):
                self._raw.put(key, value, db=self._tables[new], append=True)
            self._raw.drop(table)

    def free_dead_readers(self) -> int:
        """Free the snapshots of processes that have ended; how many there were. Their pages can be used at once."""
        return int(self._environment.reader_check())

    def old_snapshots(self) -> list[ReadSnapshot]:
        """Snapshots in use that lack a committed change, so that LMDB must keep pages for them."""
        newest = self._environment.info()["last_txnid"]
        return [each for each in snapshots(self._environment) if each.transaction < newest]

    @contextlib.contextmanager
    def nested(self) -> Iterator[Transaction]:
        """A part that takes effect whole or, when it raises, not at all."""
        self.flush()
        with self._environment.begin(parent=self._raw, write=True) as raw:
            inner = Transaction(self._environment, self._tables, raw)
            yield inner
            inner.flush()
        self.effects += inner.effects


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
            raise StoreError(f"{file} is gone or empty, but there was a store; {ADVICE}")
        self._environment, self._tables = open_environment(
            path, TABLES, MULTIPLE, map_size=max_bytes, sync=durable, metasync=durable
        )
        if not self._was_made():
            self._lock.write(MADE)
            self._lock.flush()
            os.fsync(self._lock.fileno())
        with _closed_on_error(self), self.transaction() as tx:
            if tx.identity is None:
                tx.put("meta", "identity", uuid.uuid4().hex)
            if not tx.counter("format"):
                tx.rename(RENAMED)
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
        mend = UPGRADE if found < FORMAT else "use that version"
        raise StoreError(f"the store {path} has format {found or 1} of another version of asyncrl: {mend}")


def in_use(path: Path) -> bool:
    """Whether a process has the store in this folder open for writing."""
    with (path / LOCK_FILE).open("a") as lock:
        return not _locked(lock, fcntl.LOCK_SH)


def _locked(file: IO[str], kind: int) -> bool:
    """Whether the file could be locked now; closing it ends the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class StoreReader:
    """A store opened for reading only, beside a process that may have it open for writing.

    Raises StoreError: there is no store in the folder, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "data.mdb").is_file():
            raise StoreError(f"there is no store in {path}; name the replay folder of a run, such as runs/NAME/replay")
        self.path = path
        self._environment, self._tables = open_environment(
            path, TABLES, MULTIPLE, map_size=READER_MAP_BYTES, readonly=True
        )
        with _closed_on_error(self), self.transaction() as tx:
            _check_format(path, tx)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One view of the store, as it was at one moment."""
        with clear_errors(self.path), self._environment.begin() as raw:
            yield Transaction(self._environment, self._tables, raw)

    def close(self) -> None:
        self._environment.close()
