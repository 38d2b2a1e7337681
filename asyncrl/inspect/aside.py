"""A folder that is there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import StoreError


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its name when the block ends, and is removed when it raises.

    Raises StoreError: `folder` is there already.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} is there already, and nothing is written over: name a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
