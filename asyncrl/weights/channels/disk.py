"""The engine's end of the disk channel: folders on a file system that learner and engine share."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.folders import MANIFEST, TENSORS, versions_in
from asyncrl.weights.manifest import Manifest, bytes_of, checksum, read_manifest

POLL_S = 0.1
POLLS = 10


class DiskChannel:
    """The newest folder in `directory` (see weights/folders.py).

    Every method raises UnavailableError where there is no such directory, or a folder went away meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self.endpoint = str(directory)
        self._directory = directory
        self.received = 0

    def reset(self) -> None:
        """There is nothing to drop."""

    async def newer_than(self, version: int) -> Manifest | None:
        """The newest manifest as soon as it is newer than `version`, or None after a second or so without one."""
        for _ in range(POLLS):
            found = self._folders()
            if found and (newest := max(found)) > version:
                return self._read(newest, found[newest])
            await asyncio.sleep(POLL_S)
        return None

    async def fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """All tensors of the manifest. Raises WeightsError: a checksum does not match."""
        folder = self._folders().get(manifest.version)
        if folder is None:
            raise UnavailableError(f"the folder of version {manifest.version} has gone; a newer one will follow")
        tensors = await asyncio.to_thread(_load, folder, manifest)
        self.received += manifest.nbytes
        return tensors

    def _folders(self) -> dict[int, Path]:
        try:
            return versions_in(self._directory)
        except OSError as error:
            raise UnavailableError(f"the learner's weights cannot be read here: {error}") from error

    def _read(self, version: int, folder: Path) -> Manifest:
        try:
            manifest = read_manifest(json.loads((folder / MANIFEST).read_bytes()))
        except OSError as error:
            raise UnavailableError(f"the folder of version {version} cannot be read: {error}") from error
        except ValueError as error:
            raise WeightsError(f"{folder / MANIFEST} is damaged: {error}") from error
        if manifest.version != version:
            raise WeightsError(f"{folder} holds version {manifest.version}")
        return manifest


def _load(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    try:
        found = load_file(folder / TENSORS)
    except OSError as error:
        raise UnavailableError(f"{folder} cannot be read: {error}") from error
    except SafetensorError as error:
        raise WeightsError(f"{folder / TENSORS} is damaged: {error}") from error
    for spec in manifest.tensors:
        tensor = found.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape or checksum(bytes_of(tensor)) != spec.checksum:
            raise WeightsError(f"{folder / TENSORS} is damaged: {spec.name} is not what the manifest says")
    return {spec.name: found[spec.name] for spec in manifest.tensors}
