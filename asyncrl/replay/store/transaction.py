"""One transaction of the store: reads and writes of its tables, queues and counters.

Small records are msgpack. Trajectories and labels are joined frames. LMDB has no checksums, so these values are stored
with a checksum of the value and its key. A value that was changed, or that is read under a different key, raises
StoreError.

Some tables have many values per key. These values are plain names without a checksum.
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
from asyncrl.replay.store.environment import ADVICE, ReadSnapshot, snapshots
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
    """The XXH3 checksum of a value and its key. XXH3 runs at memory speed. zlib's CRC-32 takes 20 times as long."""
    return xxh3_64_digest(value, xxh3_64_intdigest(key))


class Transaction:
    """The reads and writes of one transaction. `put_bytes` and `get_bytes` take and return bytes. `add_member` and the
    other methods for tables with many values per key take and return text. All other values are encoded in msgpack.

    Methods that return a value with a checksum raise StoreError if the value is damaged. `writes` counts the attempted
    changes. Counters are cached in memory and written by `flush`, since every request changes some of them.
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
        """Call `effect`, which changes state in memory, after the commit of this transaction. It is not called if the
        transaction is undone."""
        self.effects.append(partial(effect, *arguments, **options))

    def get(self, table: str, key: Key, kind: type[T]) -> T | None:
        """The value of a key, of type `kind`. `None` if the key does not exist."""
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
            raise self._damaged(f"{table} of {key!r} is not of the type {kind.__name__}: {error}") from error

    def get_bytes(self, table: str, key: Key) -> memoryview | None:
        raw = _key(key)
        value = self._raw.get(raw, db=self._tables[table])
        return None if value is None else self._unsealed(table, raw, value)

    def put_bytes(self, table: str, key: Key, *parts: Buffer) -> None:
        """Store the concatenation of `parts`, which are copied only once."""
        self.writes += 1
        raw = _key(key)
        seal = xxh3_64(seed=xxh3_64_intdigest(raw))
        for part in parts:
            seal.update(part)
        self._raw.put(raw, b"".join((seal.digest(), *parts)), db=self._tables[table])

    def size(self, table: str, key: Key) -> int:
        """The size of a value in bytes, without a check for damage. 0 if the key does not exist."""
        value = self._raw.get(_key(key), db=self._tables[table])
        return 0 if value is None else len(value)

    def _unsealed(self, table: str, key: bytes, sealed: bytes | memoryview) -> memoryview:
        value = memoryview(sealed)[SEAL_BYTES:]
        if _seal(key, value) != sealed[:SEAL_BYTES]:
            raise self._damaged(f"{table} of {key!r} is not what was written")
        return value

    def present(self, value: T | None, table: str, key: Key) -> T:
        """The `value` of a key to which another record refers. Raises StoreError if it is `None`."""
        if value is None:
            raise self._damaged(f"{table} of {key!r} is missing")
        return value

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._environment.path()}/data.mdb is damaged: {what}; {ADVICE}")

    def delete(self, table: str, key: Key) -> bool:
        self.writes += 1
        return bool(self._raw.delete(_key(key), db=self._tables[table]))

    def add_member(self, table: str, key: Key, member: str) -> None:
        """Add a value to the values of `key`, in a table with many values per key."""
        self.writes += 1
        self._raw.put(_key(key), _key(member), db=self._tables[table])

    def remove_member(self, table: str, key: Key, member: str) -> bool:
        """Remove one of the values of `key`. False if it does not exist."""
        self.writes += 1
        return bool(self._raw.delete(_key(key), _key(member), db=self._tables[table]))

    def members(self, table: str, key: Key) -> list[str]:
        """The values of `key`, in a table with many values per key."""
        cursor = self._raw.cursor(db=self._tables[table])
        return [bytes(value).decode() for value in cursor.iternext_dup()] if cursor.set_key(_key(key)) else []

    def items(self, table: str, kind: type[T]) -> Iterator[tuple[bytes, T]]:
        """All keys in order, with their values. During the iteration, the table may change only at keys already
        returned."""
        for key, value in self._raw.cursor(db=self._tables[table]):
            yield bytes(key), self._unpacked(table, bytes(key), value, kind)

    def keys(self, table: str) -> Iterator[bytes]:
        """All keys in order."""
        for key in self._raw.cursor(db=self._tables[table]).iternext(values=False):
            yield bytes(key)

    def page(self, table: str, after: str, count: int, prefix: str = "", backwards: bool = False) -> list[str]:
        """The next `count` keys that begin with `prefix`: after `after`, or from the first key if `after` is empty.
        With `backwards`, the keys before `after`, or from the last key, in reverse order."""
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
        """The number of values of each key, in a table with many values per key."""
        cursor = self._raw.cursor(db=self._tables[table])
        return {bytes(key).decode(): int(cursor.count()) for key in cursor.iternext_nodup()}

    def count(self, table: str) -> int:
        return int(self._raw.stat(db=self._tables[table])["entries"])

    def append(self, table: str, value: Any, queue: str = "", urgent: bool = False) -> int:
        """Put `value` at the end of a queue of an ordered table. Urgent values come before all others. Returns the
        value's position in the order of the table."""
        order = self.add(f"order/{table}/urgent") if urgent else FIRST_ORDER + self.add(f"order/{table}")
        self.put(table, queue.encode() + _key(order), value)
        return order

    def first(self, table: str, kind: type[T], queue: str = "") -> tuple[bytes, T] | None:
        """The key and the value of the first entry of a queue of an ordered table. `None` if the queue is empty."""
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
        """Add to a counter. Returns the new value."""
        return self.set(name, self.counter(name) + amount)

    def set(self, name: str, value: int) -> int:
        """Set a counter. Returns the value."""
        self.writes += 1
        self._counters[name] = value
        self._changed.add(name)
        return value

    def flush(self) -> None:
        """Write the changed counters and empty the cache, so that the next read takes them from the store."""
        for name in self._changed:
            self.put("meta", name, self._counters[name])
        self._changed.clear()
        self._counters.clear()

    @property
    def identity(self) -> str | None:
        """The store's unique identity. `None` in an old store that has none."""
        return self.get("meta", "identity", str)

    @property
    def run(self) -> RunIdentity | None:
        """The run that owns the store. `None` if no run has served it yet."""
        value = self.get("meta", "run", list[str])
        return None if value is None else RunIdentity(*value)

    def live_bytes(self) -> int:
        """The bytes of all pages in use, measured at the first call in this transaction."""
        if self._live_bytes is None:
            self._live_bytes = sum(self.table_bytes(table) for table in self._tables)
        return self._live_bytes

    def table_bytes(self, table: str) -> int:
        """The bytes of the pages of one table."""
        stat = self._raw.stat(db=self._tables[table])
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def episode_bytes(self) -> int:
        """The bytes of the pages of all trajectories and their images."""
        return self.table_bytes("data") + self.table_bytes("images")

    def free_dead_readers(self) -> int:
        """Free the snapshots of processes that have ended, and return their number. The pages of these snapshots can be
        reused at once."""
        return int(self._environment.reader_check())

    def old_snapshots(self) -> list[ReadSnapshot]:
        """The snapshots in use that are older than the last commit, so that LMDB must keep old pages for them."""
        newest = self._environment.info()["last_txnid"]
        return [each for each in snapshots(self._environment) if each.transaction < newest]

    @contextlib.contextmanager
    def nested(self) -> Iterator[Transaction]:
        """A nested transaction. If the block raises, only the changes of the block are undone."""
        self.flush()
        with self._environment.begin(parent=self._raw, write=True) as raw:
            inner = Transaction(self._environment, self._tables, raw)
            yield inner
            inner.flush()
        self.effects += inner.effects
