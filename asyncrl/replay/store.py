"""The store: LMDB tables that change together in one transaction, so that a crash leaves all of a change or none.

Nothing of the replay's state lives elsewhere. Small records are msgpack, trajectories and labels are joined frames.
"""

from __future__ import annotations

import contextlib
import fcntl
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import msgpack

from asyncrl.errors import RefusedError, StoreError

TABLES = (
    "meta",  # counters and the store's identity
    "actors",  # worker -> incarnation
    "scorers",  # worker -> incarnation
    "pending",  # order -> ticket that waits for an actor
    "tickets",  # ticket -> [group, member, worker, or "" while pending]
    "held",  # worker -> tickets it runs (many)
    "groups",  # group -> Group
    "facts",  # trajectory -> Facts; kept for good, so that an id is never taken twice
    "data",  # trajectory -> frames
    "labels",  # trajectory -> frames
    "waiting",  # kind of scores, order -> trajectory that needs them next
    "leased",  # scorer -> trajectories it scores (many)
    "ready",  # order -> [group, oldest version, spread of rewards]: complete, labelled, may be trained
    "again",  # order -> row of a task that is to be run again before the feed goes on
    "tasks",  # row -> [running success rate, epoch]
    "plans",  # step -> plan
    "dead",  # ticket -> Letter
    "evaluations",  # policy version -> Evaluation
)
MULTIPLE = ("held", "leased")
MAX_KEY_BYTES = 500
FIRST_ORDER = 1 << 48
ORDER_BYTES = 8
READER_MAP_BYTES = 1 << 42
"""Address space only: a reader must see all that a writer may yet write."""

Key = str | int | bytes


def _key(key: Key) -> bytes:
    raw = key if isinstance(key, bytes) else key.to_bytes(8, "big") if isinstance(key, int) else key.encode()
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise RefusedError(f"an id has {len(raw)} bytes; 1 to {MAX_KEY_BYTES} are taken")
    return raw


class Transaction:
    """Reads and writes of one transaction; values are plain msgpack values unless a method says bytes."""

    def __init__(self, environment: lmdb.Environment, tables: dict[str, Any], raw: lmdb.Transaction) -> None:
        self._environment = environment
        self._tables = tables
        self._raw = raw

    def get(self, table: str, key: Key) -> Any:
        value = self._raw.get(_key(key), db=self._tables[table])
        return None if value is None else msgpack.unpackb(value)

    def put(self, table: str, key: Key, value: Any) -> None:
        self._raw.put(_key(key), msgpack.packb(value), db=self._tables[table])

    def get_bytes(self, table: str, key: Key) -> bytes | None:
        value = self._raw.get(_key(key), db=self._tables[table])
        return None if value is None else bytes(value)

    def put_bytes(self, table: str, key: Key, value: bytes) -> None:
        self._raw.put(_key(key), value, db=self._tables[table])

    def delete(self, table: str, key: Key) -> bool:
        return bool(self._raw.delete(_key(key), db=self._tables[table]))

    def add_member(self, table: str, key: Key, member: str) -> None:
        """Add one of the many values that `key` has in a multiple table."""
        self._raw.put(_key(key), _key(member), db=self._tables[table])

    def remove_member(self, table: str, key: Key, member: str) -> bool:
        """Remove one of the values of `key`; False where it was not there."""
        return bool(self._raw.delete(_key(key), _key(member), db=self._tables[table]))

    def members(self, table: str, key: Key) -> list[str]:
        cursor = self._raw.cursor(db=self._tables[table])
        return [bytes(value).decode() for value in cursor.iternext_dup()] if cursor.set_key(_key(key)) else []

    def items(self, table: str) -> Iterator[tuple[bytes, Any]]:
        """Keys, in order, with their values. The table may change meanwhile only at keys already seen."""
        for key, value in self._raw.cursor(db=self._tables[table]):
            yield bytes(key), msgpack.unpackb(value)

    def keys(self, table: str) -> Iterator[bytes]:
        """Keys, in order."""
        for key in self._raw.cursor(db=self._tables[table]).iternext(values=False):
            yield bytes(key)

    def page(self, table: str, after: str, count: int) -> list[str]:
        """The next `count` keys behind `after`, in order."""
        cursor = self._raw.cursor(db=self._tables[table])
        if not cursor.set_range(after.encode() + b"\0"):
            return []
        return [bytes(key).decode() for key in islice(cursor.iternext(values=False), count)]

    def holders(self, table: str) -> dict[str, int]:
        """The keys of a multiple table, and how many values each has."""
        cursor = self._raw.cursor(db=self._tables[table])
        return {bytes(key).decode(): int(cursor.count()) for key in cursor.iternext_nodup()}

    def count(self, table: str) -> int:
        return int(self._raw.stat(db=self._tables[table])["entries"])

    def append(self, table: str, value: Any, queue: str = "", urgent: bool = False) -> None:
        """Put `value` behind all others of a queue of an ordered table; urgent ones stand before all that are not."""
        order = self.add(f"order/{table}/urgent") if urgent else FIRST_ORDER + self.add(f"order/{table}")
        self.put(table, queue.encode() + _key(order), value)

    def first(self, table: str, queue: str = "") -> tuple[bytes, Any] | None:
        """Key and value of what stands first in a queue of an ordered table."""
        cursor, prefix = self._raw.cursor(db=self._tables[table]), queue.encode()
        if not cursor.set_range(prefix + _key(0)):
            return None
        key = bytes(cursor.key())
        if len(key) != len(prefix) + ORDER_BYTES or not key.startswith(prefix):
            return None
        return key, msgpack.unpackb(cursor.value())

    def ordered(self, table: str) -> Iterator[tuple[int, Any]]:
        """Orders and values of an ordered table that has one queue."""
        for key, value in self.items(table):
            yield int.from_bytes(key, "big"), value

    def counter(self, name: str) -> int:
        return int(self.get("meta", name) or 0)

    def counters(self, prefix: str) -> dict[str, int]:
        """Every counter whose name begins with `prefix`."""
        names = (key.decode() for key in self.keys("meta"))
        return {name: self.counter(name) for name in names if name.startswith(prefix)}

    def add(self, name: str, amount: int = 1) -> int:
        """Add to a counter; returns its new value."""
        value = self.counter(name) + amount
        self.put("meta", name, value)
        return value

    @property
    def identity(self) -> str | None:
        """The store's own name; None in one that was never opened for writing since stores have names."""
        return self.get("meta", "identity")  # type: ignore[no-any-return]

    def live_bytes(self) -> int:
        """Bytes of all pages that hold something."""
        stats = [self._raw.stat(db=table) for table in self._tables.values()]
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    @contextlib.contextmanager
    def nested(self) -> Iterator[Transaction]:
        """A part that takes effect whole or, when it raises, not at all."""
        with self._environment.begin(parent=self._raw, write=True) as raw:
            yield Transaction(self._environment, self._tables, raw)


class Store:
    """A store in a folder; `durable` makes every commit survive a power loss, not only a killed process. Each store has
    an identity of its own, which tells the replay of one run from that of another.

    Raises StoreError: the folder cannot be opened as a store, or another process has it open, with the reason.
    """

    def __init__(self, path: Path, max_bytes: int, durable: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = (path / "in-use").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"the store {path} is open in another process; stop that one first") from error
        self._environment, self._tables = _open(path, map_size=max_bytes, sync=durable, metasync=durable)
        with self.transaction() as tx:
            if tx.identity is None:
                tx.put("meta", "identity", uuid.uuid4().hex)

    @contextlib.contextmanager
    def transaction(self, write: bool = True) -> Iterator[Transaction]:
        """One transaction: committed when the block ends, undone when it raises."""
        with self._environment.begin(write=write) as raw:
            yield Transaction(self._environment, self._tables, raw)

    def close(self) -> None:
        self._environment.close()
        self._lock.close()


class StoreReader:
    """A store opened for reading only, beside a process that may have it open for writing.

    Raises StoreError: there is no store in the folder, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "data.mdb").is_file():
            raise StoreError(f"there is no store in {path}; name the replay folder of a run, such as runs/NAME/replay")
        self._environment, self._tables = _open(path, map_size=READER_MAP_BYTES, readonly=True)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One view of the store, as it was at one moment."""
        with self._environment.begin() as raw:
            yield Transaction(self._environment, self._tables, raw)

    def close(self) -> None:
        self._environment.close()


def _open(path: Path, **options: Any) -> tuple[lmdb.Environment, dict[str, Any]]:
    try:
        environment = lmdb.open(str(path), max_dbs=len(TABLES), readahead=False, **options)
        create = not options.get("readonly", False)
        tables = {name: environment.open_db(name.encode(), dupsort=name in MULTIPLE, create=create) for name in TABLES}
    except lmdb.Error as error:
        raise StoreError(f"cannot open the store {path}: {error}; is it damaged, or from another version?") from error
    return environment, tables
