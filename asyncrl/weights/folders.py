"""Versions as ordinary Hugging Face folders: `vNNNNNNNN` under one directory, which appear and go whole or not at all.

A folder has `model.safetensors`, what `write_config` puts there, and `weights.json`: the manifest with its checksums.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from asyncrl.disk import save_tensors
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.manifest import Manifest, bytes_of, checksum, read_manifest, take_snapshot

TENSORS = "model.safetensors"
MANIFEST = "weights.json"
KEPT = 2
"""The newest, and the one before it, from which a slow engine may still be reading."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folder:
    """A version in a folder, whose tensors are read only when asked for.

    Both methods raise UnavailableError where the folder has gone or cannot be read, WeightsError where it is damaged.
    """

    path: Path
    manifest: Manifest

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors, their checksums verified."""
        try:
            found = load_file(self.path / TENSORS)
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be read: {error}") from error
        except SafetensorError as error:
            raise WeightsError(f"{self.path / TENSORS} is damaged: {error}") from error
        for spec in self.manifest.tensors:
            tensor = found.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape or checksum(bytes_of(tensor)) != spec.checksum:
                raise WeightsError(f"{self.path / TENSORS} is damaged: {spec.name} is not what the manifest says")
        return {spec.name: found[spec.name] for spec in self.manifest.tensors}

    def check(self) -> None:
        """See that the file is whole and has the manifest's names and shapes, without reading the contents."""
        try:
            with safe_open(self.path / TENSORS, "pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be read: {error}") from error
        except SafetensorError as error:
            raise WeightsError(f"{self.path / TENSORS} is damaged: {error}") from error
        if found != {spec.name: spec.shape for spec in self.manifest.tensors}:
            raise WeightsError(f"{self.path / TENSORS} is damaged: it has other tensors than its manifest")


Weights = Mapping[str, torch.Tensor] | Folder
"""One version as a channel brings it."""


def tensors_of(weights: Weights) -> Mapping[str, torch.Tensor]:
    """The tensors, read now where they are in a folder. Raises as `Folder.read` does."""
    return weights.read() if isinstance(weights, Folder) else weights


def read_folder(path: Path, version: int) -> Folder:
    """The folder that should hold `version`. Raises UnavailableError and WeightsError."""
    try:
        manifest = read_manifest(json.loads((path / MANIFEST).read_bytes()))
    except OSError as error:
        raise UnavailableError(f"the folder of version {version} cannot be read: {error}") from error
    except ValueError as error:
        raise WeightsError(f"{path / MANIFEST} is damaged: {error}") from error
    if manifest.version != version:
        raise WeightsError(f"{path} holds version {manifest.version}")
    return Folder(path, manifest)


def versions_in(directory: Path) -> dict[int, Path]:
    """The whole folders by version. Raises OSError: the directory cannot be read."""
    return {
        int(path.name[1:]): path for path in directory.iterdir() if path.name[:1] == "v" and path.name[1:].isdigit()
    }


def remove_all(directory: Path, spared: Collection[Path] = ()) -> None:
    """Remove the versions of an earlier life, which may not be what they were, but those spared, and what it left of
    others. Raises OSError."""
    if directory.exists():
        for stale in versions_in(directory).values():
            if stale not in spared:
                remove_folder(stale)
        for pattern in (".v*.partial", ".v*.removed"):
            for left in directory.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)


def remove_older(directory: Path, spared: Collection[Path] = (), apart: Collection[Path] = ()) -> None:
    """Remove all versions but the `KEPT` newest and those spared; what is `apart` stays, and is none of them. Raises
    OSError: the directory cannot be read."""
    ours = sorted((version, path) for version, path in versions_in(directory).items() if path not in apart)
    for _, old in ours[:-KEPT]:
        if old not in spared:
            remove_folder(old)


def write_folder(
    directory: Path, version: int, tensors: Mapping[str, torch.Tensor], write_config: Callable[[Path], object]
) -> Path:
    """The folder of `version`, written aside and renamed. Raises OSError."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    manifest = take_snapshot(version, whole, 1).manifest

    def write(aside: Path) -> None:
        aside.mkdir()
        write_config(aside)
        save_tensors(whole, aside / TENSORS, {"format": "pt"})
        (aside / MANIFEST).write_text(json.dumps(manifest.body()))

    return _make(directory / folder_name(version), write)


def link_folder(folder: Folder, directory: Path) -> Folder:
    """The same version under `directory`, where it stays when `folder` is removed: hard links to its files, or copies
    where the file system has none. Raises OSError."""

    def link(aside: Path) -> None:
        shutil.copytree(folder.path, aside, copy_function=_link)

    return Folder(_make(directory / folder_name(folder.manifest.version), link), folder.manifest)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def folder_name(version: int) -> str:
    """The name under which a version stands in its directory."""
    return f"v{version:08d}"


def _make(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled aside and then renamed."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        fill(aside)
    except OSError:
        # On a full disk nothing must be left in the way of others.
        shutil.rmtree(aside, ignore_errors=True)
        raise
    remove_folder(folder)
    aside.rename(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first: nobody takes what is left of it for a whole one. Raises OSError."""
    aside = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


class FolderWriter:
    """The learner's: writes versions in a thread of its own; one that a newer version overtakes is left out.

    Raises OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, write_config: Callable[[Path], object]) -> None:
        self._directory = directory
        self._write_config = write_config
        self._newest = -1
        self.failures = 0
        directory.mkdir(parents=True, exist_ok=True)
        remove_all(directory)
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
            remove_older(self._directory)
        except OSError as error:
            self.failures += 1
            logger.error("version %d was not written to %s: %s", version, self._directory, error)
