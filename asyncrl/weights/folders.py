"""Writes versions as Hugging Face folders, reads them and removes them. A folder is named `vNNNNNNNN`, and lies in the
directory of its run.

A folder has `model.safetensors`, the files that `write_config` writes, and `weights.json` (the manifest with its
checksums). While a folder is written or removed it has a hidden name, so readers see it whole or not at all. Only the
run's own directory is read and changed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.machine.files import save_tensors
from asyncrl.types import RunIdentity
from asyncrl.weights.canary import Canary
from asyncrl.weights.manifest import Manifest, bytes_of, checksum, take_snapshot
from asyncrl.weights.threads import NewestOnly

TENSORS = "model.safetensors"
MANIFEST = "weights.json"
KEPT = 2
"""The number of versions that stay: the newest, and the one before it, which a slow engine may still be reading."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folder:
    """A version in a folder. Its tensors are read on demand.

    `read` and `check` raise UnavailableError if the folder was removed or cannot be read, WeightsError if it is
    damaged.
    """

    path: Path
    manifest: Manifest

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be read: {error}") from error
        except SafetensorError as error:
            raise WeightsError(f"{self.path / TENSORS} is damaged: {error}") from error

    def read(self) -> dict[str, torch.Tensor]:
        """Return all tensors, with verified checksums."""
        with self._errors():
            found = load_file(self.path / TENSORS)
        for spec in self.manifest.tensors:
            tensor = found.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape or checksum(bytes_of(tensor)) != spec.checksum:
                raise WeightsError(f"{self.path / TENSORS} is damaged: {spec.name} differs from the manifest")
        return {spec.name: found[spec.name] for spec in self.manifest.tensors}

    def check(self) -> None:
        """Check that the file is whole and has the manifest's names and shapes. The contents are not read."""
        with self._errors(), safe_open(self.path / TENSORS, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if found != {spec.name: spec.shape for spec in self.manifest.tensors}:
            raise WeightsError(f"{self.path / TENSORS} is damaged: it has other tensors than its manifest")


Weights = Mapping[str, torch.Tensor] | Folder
"""One version, as a route delivers it: tensors or a folder."""


def tensors_of(weights: Weights) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a version. Reads them now if they are in a folder. Raises the errors of `Folder.read`."""
    return weights.read() if isinstance(weights, Folder) else weights


def read_folder(path: Path, version: int) -> Folder:
    """Return the folder at `path`, which must hold `version`. Raises UnavailableError: the folder is missing or cannot
    be read. WeightsError: it is damaged, or holds another version."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise UnavailableError(f"the folder of version {version} cannot be read: {error}") from error
    except ValueError as error:
        raise WeightsError(f"{path / MANIFEST} is damaged: {error}") from error
    if manifest.version != version:
        raise WeightsError(f"{path} holds version {manifest.version}")
    return Folder(path, manifest)


def run_directory(parent: Path, run: RunIdentity) -> Path:
    """Return the directory under `parent` that holds only the versions of `run`."""
    return parent / f"{quote(run.name, safe='')}-{quote(run.id, safe='')}"


def run_directories(parent: Path, run: RunIdentity) -> Iterator[Path]:
    """Yield the directories under `parent` that may belong to `run`: if the run's id is unknown, there may be several.
    Raises OSError: `parent` cannot be read."""
    for path in parent.iterdir():
        name, dash, number = path.name.rpartition("-")
        if dash and RunIdentity(unquote(name), unquote(number)).may_be(run):
            yield path


def versions_in(directory: Path) -> dict[int, Path]:
    """Map each version to its complete folder."""
    return {int(path.name[1:]): path for path in directory.glob("v" + 8 * "[0-9]")}


def folder_name(version: int) -> str:
    """Return the name of a version's folder in its directory."""
    return f"v{version:08d}"


def write_folder(
    directory: Path,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    write_config: Callable[[Path], object],
    canary: Canary | None = None,
) -> Path:
    """Write the folder of `version` under a hidden name, rename it, and return its path. Raises OSError: it cannot be
    written."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    manifest = take_snapshot(version, whole, 1, canary=canary).manifest

    def write(partial: Path) -> None:
        partial.mkdir()
        write_config(partial)
        save_tensors(whole, partial / TENSORS, {"format": "pt"})
        (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    return _make(directory, version, write)


def link_folder(folder: Folder, directory: Path) -> Folder:
    """Make a second folder of the same version under `directory`. The second folder stays when `folder` is removed. It
    has hard links to the files, or copies if the file system has no links. Raises OSError: it cannot be written.
    """

    def link(partial: Path) -> None:
        shutil.copytree(folder.path, partial, copy_function=_link)

    return Folder(_make(directory, folder.manifest.version, link), folder.manifest)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _make(directory: Path, version: int, fill: Callable[[Path], None]) -> Path:
    """Fill the folder of `version` under a hidden name, rename it, and return its path."""
    folder = directory / folder_name(version)
    partial = directory / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        fill(partial)
        partial.rename(folder)
    except Exception:
        # Frees the space of the unfinished folder, which matters on a full disk.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def remove_older(directory: Path, spared: Collection[Path] = ()) -> None:
    """Remove all versions except the `KEPT` newest and the folders in `spared`. A failure is logged, and the folder
    stays."""
    for _, old in sorted(versions_in(directory).items())[:-KEPT]:
        if old not in spared:
            remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder. A failure is logged, and the folder stays."""
    try:
        # Renames the folder first, so that no reader takes a half-removed folder for a complete one.
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.removed")))
    except OSError as error:
        logger.warning("%s could not be removed, and still takes space on the disk: %s", folder, error)


class FolderWriter:
    """Writes the versions of `run` under `parent` in a thread of its own. First it removes the versions that an earlier
    learner of the run left there.

    A version is left out if a newer one comes before its writing begins. A version that cannot be written is logged and
    counted, and the run's directory is removed until the next version is written, so that actors take versions by
    another route.

    Raises OSError: the directory cannot be written.
    """

    def __init__(self, parent: Path, write_config: Callable[[Path], object], run: RunIdentity) -> None:
        self.directory = run_directory(parent, run)
        self._write_config = write_config
        self.failures = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        for old in self.directory.iterdir():
            shutil.rmtree(old, ignore_errors=True)
        self._thread = NewestOnly("weights-folders")

    def write(self, version: int, tensors: Mapping[str, torch.Tensor], canary: Canary | None = None) -> None:
        """Begin to write `tensors`, which must never change again, and the `canary`."""
        self._thread.begin(partial(self._write, version, tensors, canary))

    def close(self) -> None:
        """Return once the version that is being written is complete."""
        self._thread.close()

    def _write(self, version: int, tensors: Mapping[str, torch.Tensor], canary: Canary | None) -> None:
        try:
            write_folder(self.directory, version, tensors, self._write_config, canary)
            remove_older(self.directory)
        except Exception as error:
            logger.exception("version %d was not written to %s: %s", version, self.directory, error)
            self._withdraw()
            self.failures += 1

    def _withdraw(self) -> None:
        """Remove the directory."""
        # As long as the directory exists, actors wait for the version there, and ask no other route.
        for folder in versions_in(self.directory).values():
            remove_folder(folder)
        shutil.rmtree(self.directory, ignore_errors=True)
