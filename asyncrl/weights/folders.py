"""Versions as ordinary Hugging Face folders: `vNNNNNNNN` under one directory, which appear and go whole or not at all.

A folder has `model.safetensors`, the files of `write_config`, `weights.json` (the manifest with its checksums) and
`run.json` (the mark of its run). A folder that is being written or removed has a hidden name with that mark. Folders
without the mark of this run are never read, removed or replaced.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.machine.files import save_tensors
from asyncrl.types import RunIdentity
from asyncrl.weights.manifest import Manifest, bytes_of, checksum, take_snapshot

TENSORS = "model.safetensors"
MANIFEST = "weights.json"
MARK = "run.json"
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
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise UnavailableError(f"the folder of version {version} cannot be read: {error}") from error
    except ValueError as error:
        raise WeightsError(f"{path / MANIFEST} is damaged: {error}") from error
    if manifest.version != version:
        raise WeightsError(f"{path} holds version {manifest.version}")
    return Folder(path, manifest)


def owners_in(directory: Path) -> Iterator[tuple[int, Path, RunIdentity]]:
    """The version, path and run of every folder that carries a run's mark. Raises OSError: it cannot be read."""
    for path in directory.iterdir():
        if path.name[:1] == "v" and (mark := _mark_of(path)) is not None:
            yield mark[0], path, mark[1]


def versions_in(directory: Path, run: RunIdentity) -> dict[int, Path]:
    """The whole folders of `run` by version. Raises OSError: the directory cannot be read."""
    return {version: path for version, path, owner in owners_in(directory) if owner.may_be(run)}


def remove_all(directory: Path, run: RunIdentity) -> None:
    """Remove the versions of `run`, and those that a killed process left half written. Raises OSError."""
    if directory.exists():
        for stale in versions_in(directory, run).values():
            remove_folder(stale, run)
        for tag in run_tags(run):
            for end in ("partial", "removed"):
                for left in directory.glob(f".v*.{tag}.{end}"):
                    shutil.rmtree(left, ignore_errors=True)


def remove_older(directory: Path, run: RunIdentity, spared: Collection[Path] = ()) -> None:
    """Remove all versions of `run` except the `KEPT` newest and those spared. Raises OSError: the directory cannot be
    read."""
    for _, old in sorted(versions_in(directory, run).items())[:-KEPT]:
        if old not in spared:
            remove_folder(old, run)


def write_folder(
    directory: Path,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    write_config: Callable[[Path], object],
    run: RunIdentity,
) -> Path:
    """The folder of `version` with the mark of `run`, written under a hidden name and renamed.

    Raises OSError; FileExistsError: something of that name is not the run's.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    manifest = take_snapshot(version, whole, 1).manifest

    def write(partial: Path) -> None:
        partial.mkdir()
        write_config(partial)
        save_tensors(whole, partial / TENSORS, {"format": "pt"})
        (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    return _make(directory, version, run, write)


def link_folder(folder: Folder, directory: Path, run: RunIdentity) -> Folder:
    """The same version under `directory`, where it stays when `folder` is removed, with a mark of its own: hard links
    to its files, or copies where the file system has none. Raises as `write_folder` does."""

    def link(partial: Path) -> None:
        shutil.copytree(folder.path, partial, ignore=shutil.ignore_patterns(MARK), copy_function=_link)

    return Folder(_make(directory, folder.manifest.version, run, link), folder.manifest)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def folder_name(version: int) -> str:
    """The name of a version's folder in its directory."""
    return f"v{version:08d}"


def _make(directory: Path, version: int, run: RunIdentity, fill: Callable[[Path], None]) -> Path:
    """The folder of `version`, filled and marked under a hidden name, and then renamed."""
    folder = directory / folder_name(version)
    partial = _hidden(folder, run, "partial")
    _check_ours(folder, run)
    shutil.rmtree(partial, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        fill(partial)
        (partial / MARK).write_text(json.dumps({"run": run.name, "id": run.id, "version": version}))
        remove_folder(folder, run)
        partial.rename(folder)
    except OSError:
        # On a full disk nothing must be left in the way of others.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def remove_folder(folder: Path, run: RunIdentity) -> None:
    """Remove a folder of `run`. It is renamed first, so that nobody takes the rest of it for a whole one. Raises
    OSError; FileExistsError: it is not the run's."""
    _check_ours(folder, run)
    removed = _hidden(folder, run, "removed")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.exists():
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _check_ours(folder: Path, run: RunIdentity) -> None:
    """Raises FileExistsError: there is something that does not carry the run's mark."""
    if not os.path.lexists(folder):
        return
    mark = _mark_of(folder)
    if mark is None or not mark[1].may_be(run):
        owner = "carries no run's mark" if mark is None else f"belongs to run {mark[1]}"
        raise FileExistsError(
            f"{folder} {owner}, so run {run} leaves it as it is: move it away, or set weights.dir to another directory"
        )


def _mark_of(folder: Path) -> tuple[int, RunIdentity] | None:
    """The version and run in a folder's mark; None where it has none, or is a copy under another name."""
    try:
        mark = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError):
        # A mark that cannot be read is not ours.
        return None
    match mark:
        case {"run": str(name), "id": str(number), "version": int(version)} if folder.name == folder_name(version):
            return version, RunIdentity(name, number)
    return None


def _hidden(folder: Path, run: RunIdentity, end: str) -> Path:
    return folder.with_name(f".{folder.name}.{run_tags(run)[0]}.{end}")


def is_written_by(directory: Path, run: RunIdentity) -> bool:
    """Whether a learner of a run of this name writes its versions to `directory`, or did so."""
    return _learner_mark(directory, run).exists()


def _learner_mark(directory: Path, run: RunIdentity) -> Path:
    return directory / f".{run_tags(run)[1]}.learner"


def run_tags(run: RunIdentity) -> tuple[str, str]:
    """The run's mark for names of files, whatever characters its own name has; and the mark of a process of the same
    run that knows only its name."""
    return _tag(run.name, run.id), _tag(run.name, "")


def _tag(name: str, number: str) -> str:
    return blake2b(json.dumps([name, number]).encode(), digest_size=8).hexdigest()


class FolderWriter:
    """Writes the learner's versions of `run` in a thread of its own.

    A version that a newer one overtakes is left out. A version that cannot be written is logged and counted.

    Raises OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, write_config: Callable[[Path], object], run: RunIdentity) -> None:
        self._directory = directory
        self._write_config = write_config
        self._run = run
        self._newest = -1
        self.failures = 0
        directory.mkdir(parents=True, exist_ok=True)
        remove_all(directory, run)
        _learner_mark(directory, run).touch()
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
            write_folder(self._directory, version, tensors, self._write_config, self._run)
            remove_older(self._directory, self._run)
        except OSError as error:
            self.failures += 1
            logger.error("version %d was not written to %s: %s", version, self._directory, error)
