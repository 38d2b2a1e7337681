"""Opens LMDB files that may be damaged, or whose disk may be full. Errors tell how to repair them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import lmdb

from asyncrl.errors import ConfigError, StoreError
from asyncrl.machine.files import NO_ROOM

MOST_UNWRITTEN_BYTES = 1 << 20
NO_ROOM_BYTES = 1 << 20
"""The free space below which a full disk counts as the cause of a failed commit."""
READERS_FILE, READERS_BYTES = "lock.mdb", 8192
"""LMDB's table of readers, and its size for LMDB's usual number of readers. Each reader adds itself to the table, and a
writer keeps the pages that readers still read."""
BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)
ADVICE = "restore the folder from a copy, or start a new run with model.path set to the last export"
OTHER_VERSION = "use the asyncrl version that wrote it, or start a new run with model.path set to the last export"


def open_environment(
    path: Path, names: Sequence[str], multiple: Collection[str], **options: Any
) -> tuple[lmdb.Environment, dict[str, Any]]:
    """Open the LMDB environment in a folder. Returns it and its tables by name. Tables in `multiple` have many values
    per key.

    Raises StoreError: the environment cannot be opened, its file is truncated, or another version wrote it; OSError:
    the disk of a writer is full (ENOSPC); ConfigError: the environment of a writer is full.
    """
    try:
        with contextlib.nullcontext() if options.get("readonly") else clear_room_errors(path):
            return _opened(path, names, multiple, **options)
    except lmdb.NotFoundError as error:
        raise StoreError(f"the store {path} lacks a table of this version: {OTHER_VERSION}") from error
    except lmdb.Error as error:
        raise StoreError(f"cannot open the store {path}: {error}; if it is damaged, {ADVICE}") from error


def lacks_room(error: lmdb.Error, path: Path) -> bool:
    """True if a commit to the store in `path` failed because its disk is full."""
    # LMDB reports an input/output error, which has no class of its own, if only a part of a commit fitted on the disk.
    return isinstance(error, lmdb.DiskError) or (type(error) is lmdb.Error and disk_usage(path).free < NO_ROOM_BYTES)


@contextlib.contextmanager
def clear_room_errors(path: Path) -> Iterator[None]:
    """Turn LMDB's errors about missing room into clear ones: OSError with ENOSPC, as other writes to a full disk raise
    it, or ConfigError if the store is full."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise ConfigError(f"the store {path} is full: start the run again with a larger replay.max_store_gb") from error
    except lmdb.Error as error:
        if not lacks_room(error, path):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def _opened(
    path: Path, names: Sequence[str], multiple: Collection[str], **options: Any
) -> tuple[lmdb.Environment, dict[str, Any]]:
    if not options.get("readonly"):
        _take_room_for_readers(path / READERS_FILE)
    environment = lmdb.open(str(path), max_dbs=len(names), readahead=False, **options)
    try:
        create = not options.get("readonly", False)
        _require_whole(environment, path / "data.mdb", writes=create)
        tables = {name: environment.open_db(name.encode(), dupsort=name in multiple, create=create) for name in names}
    except BaseException:
        environment.close()
        raise
    return environment, tables


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """A snapshot that a process is reading: the process id, its slot in LMDB's table of readers, and the newest
    transaction in the snapshot."""

    pid: int
    slot: str
    transaction: int


def snapshots(environment: lmdb.Environment) -> list[ReadSnapshot]:
    """The snapshots that processes are reading now."""
    # LMDB lists them as text: a line of titles, then one line per slot, with "-" for a slot without a transaction.
    lines = (line.split() for line in environment.readers().splitlines()[1:])
    return [ReadSnapshot(int(pid), slot, int(number)) for pid, slot, number in lines if number != "-"]


def _take_room_for_readers(file: Path) -> None:
    """Take room on the disk for LMDB's table of readers. LMDB maps it into memory: on a full disk, the first write to a
    part without room would kill the process with a signal. Raises OSError: there is no room."""
    # Does not open a file that already has room for the table: closing the file would end the locks that other code in
    # this process holds.
    with contextlib.suppress(FileNotFoundError):
        if (found := file.stat()).st_size >= READERS_BYTES and found.st_blocks * BLOCK_BYTES >= found.st_size:
            return
    with file.open("ab") as raw:
        try:
            os.posix_fallocate(raw.fileno(), 0, max(READERS_BYTES, raw.tell()))
        except OSError as error:
            if error.errno in NO_ROOM:  # Some file systems can take no room in advance.
                raise


def _require_whole(environment: lmdb.Environment, file: Path, writes: bool) -> None:
    """Refuse a truncated file: a read beyond its end would kill the process with a signal.

    A few missing pages at the end are not damage: LMDB does not write pages that one transaction both took and freed.
    This function adds the missing pages, which does not disturb another process that writes. Raises OSError if this
    process writes and its disk is full: it can then wait for room.
    """
    whole = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    missing = whole - file.stat().st_size
    if missing > MOST_UNWRITTEN_BYTES:
        raise StoreError(f"{file} is truncated: {missing} of {whole} bytes are missing; {ADVICE}")
    if missing > 0:
        try:
            with file.open("r+b") as raw:
                os.posix_fallocate(raw.fileno(), whole - 1, 1)
        except OSError as error:
            if writes and error.errno in NO_ROOM:
                raise
            raise StoreError(f"{file} lacks its last {missing} bytes, and cannot be filled up: {error}") from error


@contextlib.contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turns LMDB's errors about damage into StoreError."""
    try:
        yield
    except DAMAGE as error:
        raise StoreError(f"{path / 'data.mdb'} is damaged: {error}; {ADVICE}") from error
