"""One transaction of the store: reads and writes of its tables, queues and counters.

Small records are msgpack, trajectories and labels are joined frames. LMDB has no checksums of its own, so every value
is sealed: what reads back otherwise than it was written, or under another key, raises StoreError and is never taken for
data.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, takewhile
from typing import Any, ParamSpec, TypeVar

import lmdb
from msgspec import DecodeError, msgpack
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.environment import ADVICE, ReadSnapshot, snapshots
from asyncrl.types import RunIdentity
from asyncrl.wire import Buffer

MAX_KEY_BYTES = 500
FIRST_ORDER = 1 << 48
ORDER_BYTES = 8
SEAL_BYTES = 8

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

    Every method that reads a value raises StoreError if it is damaged. `writes` counts the changes that were tried.
    Counters are kept in memory and written once, by `flush`, since every request changes some.
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
        """A value that others refer to. Raises StoreError: it is missing."""
        if value is None:
            raise self._damaged(f"{table} of {key!r} is missing")
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
        """The next `count` keys that begin with `prefix`, in order, after `after` or, if that is empty, from the first
        on. `backwards`: before `after` or from the last on."""
        cursor, begin = self._raw.cursor(db=self._tables[table]), prefix.encode()
        if backwards:
            end = after.encode() or begin + b"\xff"  # No text has this byte.
            there = cursor.prev() if cursor.set_range(end) else cursor.last()
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
        """Put `value` at the end of a queue of an ordered table; urgent ones come before all that are not. Returns its
        order there."""
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

    def queue(self, table: str, kind: type[T], queue: str) -> list[T]:
        """The values of a queue of an ordered table, in order."""
        cursor, prefix = self._raw.cursor(db=self._tables[table]), queue.encode()
        if not cursor.set_range(prefix + _key(0)):
            return []
        entries = ((bytes(key), value) for key, value in cursor)
        own = takewhile(
            lambda entry: entry[0].startswith(prefix) and len(entry[0]) == len(prefix) + ORDER_BYTES, entries
        )
        return [self._unpacked(table, key, value, kind) for key, value in own]

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
        """Write the counters that changed, and forget all: the next read takes them from the store."""
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

    def free_dead_readers(self) -> int:
        """Free the snapshots of processes that have ended; how many there were. Their pages can be used at once."""
        return int(self._environment.reader_check())

    def old_snapshots(self) -> list[ReadSnapshot]:
        """Snapshots in use that lack a committed change, so that LMDB must keep pages for them."""
        newest = self._environment.info()["last_txnid"]
        return [each for each in snapshots(self._environment) if each.transaction < newest]

    @contextlib.contextmanager
    def nested(self) -> Iterator[Transaction]:
        """A nested transaction: it takes effect as a whole or, when it raises, has no effect."""
        self.flush()
        with self._environment.begin(parent=self._raw, write=True) as raw:
            inner = Transaction(self._environment, self._tables, raw)
            yield inner
            inner.flush()
        self.effects += inner.effects
