"""The folders from which the servers of one actor load: written by the actor, or the learner's under another name."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.folders import Folder, link_folder, remove_older, start_afresh, write_folder


class Folders:
    """Versions under `directory`, which is this actor's alone, with the configuration that `write_config` writes.

    What servers are reading is never removed. Of the others the newest are kept, as weights/folders.py says; so a
    late joiner always finds the newest. Raises OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, write_config: Callable[[Path], object]) -> None:
        self._directory = directory
        self._write_config = write_config
        self._readers: Counter[Path] = Counter()
        start_afresh(directory)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """The folder of `version`, written now. Raises WeightsError."""
        try:
            folder = write_folder(self._directory, version, tensors, self._write_config)
            self._prune()
        except OSError as error:
            raise WeightsError(f"version {version} could not be written to disk: {error}") from error
        return folder

    def hold(self, folder: Folder) -> Folder:
        """The learner's folder under a name of our own, since the learner removes it when it likes.

        Raises UnavailableError: it has gone already. WeightsError: it cannot have another name.
        """
        try:
            held = link_folder(folder, self._directory)
            self._prune()
        except OSError as error:
            if not folder.path.exists():
                raise UnavailableError(f"{folder.path} has gone; a newer one will follow") from error
            raise WeightsError(
                f"{folder.path} cannot be held in {self._directory}, which must be writable here: {error}"
            ) from error
        return held

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """Keep a folder for as long as a server loads it."""
        self._readers[path] += 1
        try:
            yield path
        finally:
            self._readers[path] -= 1

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _prune(self) -> None:
        remove_older(self._directory, [path for path, readers in list(self._readers.items()) if readers])
