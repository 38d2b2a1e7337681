"""Whether a checkpoint's files are still what was written: every file's size and digest, in a JSON file beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from xxhash import xxh3_64

from asyncrl.learner.ranks import Ranks

PREFIX = "seal-"
CHUNK_BYTES = 16 << 20


def seal(folder: Path, ranks: Ranks) -> Path:
    """Write down what this rank's share of the files in `folder` holds; returns the file, which need not be on the disk
    yet. Called by all ranks alike, once all files are there."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith(PREFIX))
    digests = {file.name: _digest(file) for file in files[ranks.rank :: ranks.size]}
    path = folder / f"{PREFIX}{ranks.rank:05d}.json"
    path.write_text(json.dumps({"ranks": ranks.size, "files": digests}))
    return path


def damage(folder: Path, ranks: Ranks) -> str | None:
    """What is wrong with a sealed folder; None, on every rank, where nothing is.

    Called by all ranks alike, each of which looks at a share of the files. A folder without any seal is taken as it is.
    """
    found = _damage(folder, ranks)
    if not ranks.sum(torch.tensor(int(found is not None))).item():
        return None
    return found or "another rank found it damaged"


def _damage(folder: Path, ranks: Ranks) -> str | None:
    seals = sorted(folder.glob(f"{PREFIX}*.json"))
    if not seals:
        return None
    try:
        return _difference(folder, seals, ranks)
    except OSError as error:
        return f"it cannot be read: {error}"


def _difference(folder: Path, seals: Sequence[Path], ranks: Ranks) -> str | None:
    """Raises OSError: a disk fails, so that a file is there and does not come back."""
    try:
        read = [json.loads(path.read_text()) for path in seals]
        digests = {name: digest for each in read for name, digest in each["files"].items()}
        if len(seals) != read[0]["ranks"]:
            return f"{len(seals)} of {read[0]['ranks']} seals are there"
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its seals cannot be read: {error!r}"
    for name in sorted(digests)[ranks.rank :: ranks.size]:
        if not (folder / name).is_file():
            return f"{name} is gone"
        if _digest(folder / name) != digests[name]:
            return f"{name} is not what was written"
    return None


def _digest(path: Path) -> list[int | str]:
    """Size and XXH3 of a file."""
    digest, size = xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return [size, digest.hexdigest()]
