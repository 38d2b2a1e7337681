"""Opens LMDB files that may be damaged. Errors tell how to repair them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from asyncrl.errors import StoreError

MOST_UNWRITTEN_BYTES = 1 << 20
DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)
ADVICE = "restore the folder from a copy, or start a new run with model.path set to the last export"
OTHER_VERSION = "use the asyncrl version that wrote it, or start a new run with model.path set to the last export"


def open_environment(
    path: Path, names: Sequence[str], multiple: Collection[str], **options: Any
) -> tuple[lmdb.Environment, dict[str, Any]]:
    """Open the LMDB environment in a folder. Returns it and its tables by name. Tables in `multiple` have many values
    per key.

    Raises StoreError: the environment cannot be opened, its file is truncated, or another version wrote it.
    """
    try:
        environment = lmdb.open(str(path), max_dbs=len(names), readahead=False, **options)
        try:
            _require_whole(environment, path / "data.mdb")
            create = not options.get("readonly", False)
            tables = {
                name: environment.open_db(name.encode(), dupsort=name in multiple, create=create) for name in names
            }
        except BaseException:
            environment.close()
            raise
    except lmdb.NotFoundError as error:
        raise StoreError(f"the store {path} lacks a table of this version: {OTHER_VERSION}") from error
    except lmdb.Error as error:
        raise StoreError(f"cannot open the store {path}: {error}; if it is damaged, {ADVICE}") from error
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


def _require_whole(environment: lmdb.Environment, file: Path) -> None:
    """Refuse a truncated file: a read beyond its end would kill the process with a signal.

    A few missing pages at the end are no damage: LMDB does not write pages that one transaction both took and freed.
    This function adds the missing pages, which does not disturb another process that writes.
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
            raise StoreError(f"{file} lacks its last {missing} bytes, and cannot be filled up: {error}") from error


@contextlib.contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turns LMDB's errors about damage into StoreError."""
    try:
        yield
    except DAMAGE as error:
        raise StoreError(f"{path / 'data.mdb'} is damaged: {error}; {ADVICE}") from error
