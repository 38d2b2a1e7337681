"""Tests that several machines share a folder: one machine writes a file into it, and the other machines look for that
file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from asyncrl.machine.files import missing_folders, remove_empty

SEEN_S = 3.0
"""A network disk may show a new file this many seconds late."""
POLL_S = 0.1


@contextmanager
def canary(folder: Path) -> Iterator[Path]:
    """Make a new file in a folder, which is created if it is missing. The end of the block removes the file, the
    answers of other machines (`answer_to`), and empty folders that were created for the file. Raises OSError: the
    folder cannot be written."""
    made = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".canary-{uuid4().hex}"
    file.touch()
    try:
        yield file
    finally:
        for each in folder.glob(f"{file.name}*"):
            each.unlink(missing_ok=True)
        remove_empty(made or [folder])


def sees(file: Path, wait_s: float = SEEN_S) -> bool:
    """True if this machine sees the canary (new file) of another machine within `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return seen


def answer_to(file: Path, index: int) -> Path:
    """Return the file that machine number `index` writes next to a canary (new file) that it sees, to test the other
    direction."""
    return file.with_name(f"{file.name}-{index}")
