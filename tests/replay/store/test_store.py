"""The store by itself: values are sealed to their place, and a store that is missing is not begun again."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from asyncrl.errors import StoreError
from asyncrl.replay.store.store import FORMAT, LOCK_FILE, READERS_FILE, Store, StoreReader, in_use
from asyncrl.replay.store.transaction import Transaction


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, 1 << 24, durable=False)


@pytest.mark.parametrize("size", [0, 1, 100, 5000, 100_000])
def test_bytes_come_back_as_they_were(store: Store, size: int) -> None:
    value = bytes(range(256)) * (size // 256 + 1)
    with store.transaction() as tx:
        tx.put_bytes("data", "a", value[:size])
    with store.transaction(write=False) as tx:
        assert tx.get_bytes("data", "a") == value[:size]


def test_a_store_whose_disk_is_full_can_be_opened_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([lmdb.DiskError("mdb_env_open: No space left"), lmdb.Error("mdb_env_open: Input/output error")])
    really = lmdb.open

    def full(*words: Any, **options: Any) -> lmdb.Environment:
        if (error := next(errors, None)) is not None:
            raise error
        return really(*words, **options)

    monkeypatch.setattr(lmdb, "open", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as refused:
        Store(tmp_path, 1 << 24, durable=False)
    assert refused.value.errno == errno.ENOSPC
    with pytest.raises(StoreError, match="Input/output error; if it is damaged"):
        Store(tmp_path, 1 << 24, durable=False)
    Store(tmp_path, 1 << 24, durable=False).close()


def test_a_store_whose_disk_was_full_after_its_first_page_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "data.mdb"
    Store(tmp_path, 1 << 24, durable=False).close()
    first = file.read_bytes()[: mmap.PAGESIZE]
    file.write_bytes(first)
    with pytest.raises(StoreError):
        Store(tmp_path, 1 << 24, durable=False)
    assert file.read_bytes() == first, "a store that was made is damaged, so its file is kept"
    (tmp_path / "in-use").unlink()
    Store(tmp_path, 1 << 24, durable=False).close()


def test_a_value_under_anothers_key_is_damage(store: Store, tmp_path: Path) -> None:
    with store.transaction() as tx:
        tx.put("trajectories", "a", [1, 2, 3])
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=100) as environment:
        table = environment.open_db(b"trajectories")
        with environment.begin(write=True) as raw:
            raw.put(b"b", raw.get(b"a", db=table), db=table)
    with Store(tmp_path, 1 << 24, durable=False).transaction() as tx:
        assert tx.get("trajectories", "a", list[int]) == [1, 2, 3]
        for read in (lambda: tx.get("trajectories", "b", list[int]), lambda: list(tx.items("trajectories", list[int]))):
            with pytest.raises(
                StoreError, match=r"data\.mdb is damaged: trajectories of b'b' is not what was written; restore"
            ):
                read()


def test_a_value_of_another_type_and_one_that_is_gone_are_damage(store: Store) -> None:
    with store.transaction() as tx:
        tx.put("trajectories", "a", [1, 2, 3])
        with pytest.raises(StoreError, match="trajectories of b'a' is not of the type int"):
            tx.get("trajectories", "a", int)
        with pytest.raises(StoreError, match="trajectories of 'b' is missing"):
            tx.present(tx.get("trajectories", "b", int), "trajectories", "b")


@pytest.mark.parametrize("found", [0, FORMAT - 1, FORMAT + 1])
def test_a_store_of_another_format_is_refused_by_readers_and_writers_with_what_to_do(
    store: Store, tmp_path: Path, found: int
) -> None:
    with store.transaction() as tx:
        tx.set("format", found)
    store.close()
    reason = f"has format {found}, and this version reads {FORMAT}: use the asyncrl version that wrote it, or start a"
    for opened in (lambda: Store(tmp_path, 1 << 24, durable=False), lambda: StoreReader(tmp_path)):
        with pytest.raises(StoreError, match=reason):
            opened()


def test_a_store_without_a_table_of_this_version_is_refused_with_what_to_do(store: Store, tmp_path: Path) -> None:
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=100) as environment, environment.begin(write=True) as raw:
        raw.drop(environment.open_db(b"plans", raw))
    with pytest.raises(StoreError, match="lacks a table of this version: use the asyncrl version that wrote it"):
        StoreReader(tmp_path)


def leave_pages_unwritten(store: Store) -> None:
    """Free pages at the end of the store in the transaction that took them, and close the store."""
    with store.transaction() as tx:
        tx.put_bytes("data", "kept", b"k" * 10_000)
        for index in range(20):
            tx.put_bytes("data", f"{index}", b"x" * 20_000)
        for index in range(20):
            tx.delete("data", f"{index}")
    store.close()


def test_a_reader_that_lacks_room_for_the_last_pages_says_so_as_a_store_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    leave_pages_unwritten(store)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match=r"lacks its last .* No space left on device"):
            StoreReader(tmp_path)
    StoreReader(tmp_path).close()


def test_pages_that_were_freed_unwritten_at_the_end_are_no_truncation(store: Store, tmp_path: Path) -> None:
    leave_pages_unwritten(store)
    reader = StoreReader(tmp_path)
    with reader.transaction() as tx:
        assert tx.get_bytes("data", "kept") == b"k" * 10_000
    reader.close()
    Store(tmp_path, 1 << 24, durable=False).close()


def test_a_store_whose_file_is_gone_is_not_begun_anew(store: Store, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "data.mdb").unlink()
    with pytest.raises(StoreError, match="missing or empty"):
        Store(tmp_path, 1 << 24, durable=False)


def test_a_first_start_that_was_killed_before_it_wrote_anything_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "in-use").touch()
    (tmp_path / "data.mdb").touch()
    Store(tmp_path, 1 << 24, durable=False).close()


def test_a_store_that_another_process_locks_for_a_moment_is_opened_and_one_that_stays_locked_is_refused(
    tmp_path: Path,
) -> None:
    with (tmp_path / LOCK_FILE).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(StoreError, match="open in another process"):
            Store(tmp_path, 1 << 24, durable=False, patience_s=0)
        threading.Timer(0.05, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        Store(tmp_path, 1 << 24, durable=False, patience_s=60).close()


def test_who_may_not_write_the_table_of_readers_reads_a_store_that_nobody_writes(store: Store, tmp_path: Path) -> None:
    with store.transaction() as tx:
        tx.put_bytes("data", "kept", b"k")
    # No user has a file that is not there; root may write all others.
    (tmp_path / READERS_FILE).unlink()
    with pytest.raises(StoreError, match="is in use; reading it meanwhile needs write access to"):
        StoreReader(tmp_path)
    store.close()
    before = sorted(tmp_path.iterdir())
    reader = StoreReader(tmp_path)
    with reader.transaction() as tx:
        assert bytes(tx.get_bytes("data", "kept") or b"") == b"k"
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(StoreError, match="open in another process"):
        Store(tmp_path, 1 << 24, durable=False, patience_s=0.0)
    reader.close()
    Store(tmp_path, 1 << 24, durable=False).close()
    (tmp_path / LOCK_FILE).unlink()
    assert not in_use(tmp_path)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_nested_part_and_the_rest_see_the_counters_of_each_other(store: Store) -> None:
    with store.transaction() as tx:
        tx.add("n")
        with tx.nested() as inner:
            assert inner.counter("n") == 1
            inner.add("n")
        assert tx.counter("n") == 2

    def fail(tx: Transaction) -> None:
        with tx.nested() as inner:
            inner.add("n")
            raise KeyError

    with store.transaction() as tx:
        with pytest.raises(KeyError):
            fail(tx)
        assert tx.counter("n") == 2


def test_a_queue_has_nothing_of_one_whose_name_begins_as_its_own_does(store: Store) -> None:
    with store.transaction() as tx:
        tx.append("waiting", "long", queue="rules-2")
        assert tx.first("waiting", str, "rules") is None
        assert tx.queue("waiting", str, "rules") == []
        tx.append("waiting", "short", queue="rules")
        assert tx.queue("waiting", str, "rules") == ["short"]
