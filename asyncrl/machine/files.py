"""Files and folders that are there whole or not at all, whoever is killed meanwhile: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def beside(path: Path) -> Path:
    """The name under which `path` is written before it takes its own: hidden, and the same at every try."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folder where there is none: a reader sees the old text or the new one, also after a power
    loss. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, survive a power loss. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
