"""Stores demonstrations as tokens, in files that every rank of a learner maps into memory.

When a run first starts, its demonstrations are rendered (`asyncrl.episode.demonstrations`, with the policy's chat
template) into a subfolder of the run. The subfolder's name is a hash of everything that determines the tokens, so a
resumed run finds them again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.opening import Rendering, digest_of
from asyncrl.data.tables import find_files
from asyncrl.errors import DataError
from asyncrl.machine.files import partial_name, sync

Rendered = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""The token ids int32[T] of one demonstration, and a mask bool[T] of its learned turns."""
FORMAT = 2
"""The version of the rendering. It grows when a change of the code renders the same rows to other tokens or masks, so
that no older rendering is read. From version 2 on, assistant turns of the column `prompt` are context."""


@dataclass(frozen=True)
class RenderedDemonstrations:
    """D demonstrations with N tokens in total.

    - `tokens` int32[N], and `mask` bool[N] of learned turns
    - `ends` int64[D]: the exclusive end of each demonstration in `tokens`
    - `digest`: a hash of the three arrays
    - `cut`: the number of rows that were truncated, because they were too long
    - `left_out`: the number of rows that were left out, because they were too long
    - `made_from`: a hash of the source files
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    ends: NDArray[np.int64]
    digest: str
    cut: int = 0
    left_out: int = 0
    made_from: str = ""

    @staticmethod
    def of(rows: Sequence[Rendered], cut: int = 0, left_out: int = 0) -> RenderedDemonstrations:
        tokens, mask = (np.concatenate(each) for each in zip(*rows, strict=True))
        ends = np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64)
        digest = hashlib.sha256(b"".join(each.tobytes() for each in (tokens, mask, ends))).hexdigest()[:16]
        return RenderedDemonstrations(tokens, mask, ends, digest, cut, left_out)

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each demonstration, int64[D]."""
        return np.diff(self.ends, prepend=0)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """The number of learned tokens of each demonstration, int64[D]."""
        return np.add.reduceat(self.mask, self.ends - self.lengths, dtype=np.int64)

    def row(self, index: int) -> Rendered:
        """One demonstration, as views of the arrays."""
        end = self.ends[index]
        span = slice(end - self.lengths[index], end)
        return self.tokens[span], self.mask[span]


@dataclass(frozen=True, slots=True)
class RunDemonstrations:
    """The rendered demonstrations of a run.

    - `run_dir`: the run's folder
    - `overlong`: what happens to rows with more than `max_tokens` tokens
    - `store`: the replay folder of another run; this run then trains on the episodes of that run. None: it trains on
      its own episodes
    """

    run_dir: Path
    rendering: Rendering
    max_tokens: int
    overlong: str
    store: Path | None

    def folder(self, sources: Sequence[str]) -> Path:
        """The folder with the rendered demonstrations of `sources`. Raises DataError: a source does not exist."""
        files = [(str(path), _bytes(path)) for source in sources for path in find_files(str(source))]
        shown = [self.rendering.model, self.rendering.actor]
        made_from = [FORMAT, files, *shown, self.max_tokens, self.overlong]
        return self.run_dir / "demonstrations" / digest_of(made_from)

    def read(self, sources: Sequence[str]) -> RenderedDemonstrations:
        """Read the rendered demonstrations of `sources`: those of this run, or else those of the run that has the
        folder `store`.

        Raises DataError: neither run has rendered them, or the files are damaged.
        """
        folder = self.folder(sources)
        if self.store is not None and not folder.exists():
            folder = self.store.absolute().parent / folder.relative_to(self.run_dir)
        return read_rendered(folder)


def files_of(source: str) -> list[Path]:
    """The files of a source. If the source is a folder that Hugging Face `datasets` wrote, these are the files in
    it."""
    return [file for path in find_files(str(source)) for file in _within(path)]


def _within(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _bytes(path: Path) -> int:
    """The size of a file or folder. Raises DataError: it does not exist."""
    try:
        return sum(each.stat().st_size for each in _within(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def write_rendered(rendered: RenderedDemonstrations, folder: Path) -> None:
    """Write `folder` atomically, replacing its contents. Raises OSError."""
    partial = partial_name(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("tokens", "mask", "ends"):
        save_array(getattr(rendered, name), partial / f"{name}.npy")
    about = {name: getattr(rendered, name) for name in ("digest", "cut", "left_out", "made_from")}
    (partial / "about.json").write_text(json.dumps(about))
    for each in (*partial.iterdir(), partial):
        sync(each)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def save_array(array: NDArray[Any], path: Path) -> None:
    """Write an array like `np.save`, but raise the OSError of a full disk, which `np.save` hides."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array).data)


def read_rendered(folder: Path) -> RenderedDemonstrations:
    """Map the files of `write_rendered` into memory. Raises DataError: a file does not exist or is damaged."""
    try:
        arrays = [
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("tokens", "mask", "ends")
        ]
        return RenderedDemonstrations(*arrays, **json.loads((folder / "about.json").read_text()))
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise DataError(
            f"the rendered demonstrations cannot be read: {error}; `asyncrl train` and `asyncrl sft` render them"
        ) from error
