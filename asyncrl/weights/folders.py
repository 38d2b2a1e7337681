"""Versions as ordinary Hugging Face folders: `vNNNNNNNN` under one directory, which appear whole or not at all.

A folder has `model.safetensors`, what `write_config` puts there, and `weights.json`: the manifest with its checksums.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyncrl.weights.manifest import Manifest, take_snapshot

TENSORS = "model.safetensors"
MANIFEST = "weights.json"
KEPT = 2
"""The newest, and the one before it, from which a slow engine may still be reading."""

logger = logging.getLogger(__name__)


def versions_in(directory: Path) -> dict[int, Path]:
    """The whole folders by version. Raises OSError: the directory cannot be read."""
    return {
        int(path.name[1:]): path for path in directory.iterdir() if path.name[:1] == "v" and path.name[1:].isdigit()
    }


class FolderWriter:
    """Writes versions in a thread of its own; one that a newer version overtakes is left out.

    Versions of an earlier life of the learner are removed at the start, since they may not be what they were. Raises
    OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, write_config: Callable[[Path], object]) -> None:
        self._directory = directory
        self._write_config = write_config
        self._newest = -1
        self.failures = 0
        directory.mkdir(parents=True, exist_ok=True)
        for stale in versions_in(directory).values():
            shutil.rmtree(stale)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-folders")

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write `tensors`, which are never changed again; returns at once."""
        self._newest = version
        self._thread.submit(self._write, version, tensors)

    def close(self) -> None:
        """Return once the version under way is written."""
        self._thread.shutdown(cancel_futures=True)

    def _write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if version != self._newest:
            return
        try:
            write_folder(self._directory, version, tensors, self._write_config)
            for _, old in sorted(versions_in(self._directory).items())[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            self.failures += 1
            logger.error("version %d was not written to %s: %s", version, self._directory, error)


def write_folder(
    directory: Path, version: int, tensors: Mapping[str, torch.Tensor], write_config: Callable[[Path], object]
) -> Path:
    """The folder of `version`, written aside and renamed. Raises OSError."""
    folder = directory / f"v{version:08d}"
    aside = directory / f".{folder.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_config(aside)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, aside / TENSORS, {"format": "pt"})
    (aside / MANIFEST).write_text(json.dumps(_manifest(version, whole).body()))
    aside.rename(folder)
    return folder


def _manifest(version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    return take_snapshot(version, tensors, 1).manifest
