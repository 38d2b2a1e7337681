"""One version of the weights on its way into servers, as tensors or as a folder that is written when asked for."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyncrl.errors import WeightsError

KEPT_FOLDERS = 2
"""The one that servers read now, and the one before it, from which a slow server may still be reading."""


class Folders:
    """Hugging Face folders of versions under `directory`, with the configuration of the model at `write_config`.

    A folder has its name only once it is whole; of older ones, `KEPT_FOLDERS` in all are kept.
    """

    def __init__(self, directory: Path, write_config: Callable[[Path], object]) -> None:
        self._directory = directory
        self._write_config = write_config

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """The folder of `version`, written now."""
        folder = self._directory / f"v{version:08d}"
        aside = self._directory / f".{folder.name}.partial"
        for stale in (aside, folder):
            shutil.rmtree(stale, ignore_errors=True)
        aside.mkdir(parents=True)
        self._write_config(aside)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            aside / "model.safetensors",
            {"format": "pt"},
        )
        aside.rename(folder)
        for old in sorted(self._directory.glob("v*"))[:-KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
        return folder


class Update:
    """`tensors` of `version`, on the CPU and never changed; `label` names them towards servers."""

    def __init__(
        self, version: int, label: str, tensors: Mapping[str, torch.Tensor], folders: Folders | None = None
    ) -> None:
        self.version = version
        self.label = label
        self.tensors = tensors
        self._folders = folders
        self._folder: asyncio.Task[Path] | None = None

    async def folder(self) -> Path:
        """The folder that holds this version. Raises WeightsError: this actor writes none, or could not."""
        if self._folders is None:
            raise WeightsError("weights travel as tensors only; add disk to weights.transports")
        if self._folder is None or (self._folder.done() and self._folder.exception()):
            self._folder = asyncio.create_task(asyncio.to_thread(self._folders.write, self.version, self.tensors))
        try:
            return await asyncio.shield(self._folder)
        except OSError as error:
            raise WeightsError(f"version {self.version} could not be written to disk: {error}") from error
