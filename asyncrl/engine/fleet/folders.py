"""The folders from which the servers of one actor process load weights. The actor writes them, or makes links to the
learner's folders.

Every process has one directory in its run's directory, and updates the directory's time stamp while it lives. A
directory with an old time stamp belongs to a killed process, and no server can still be loading from it. The next actor
of the run that finds such a directory removes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.types import RunIdentity
from asyncrl.weights.folders import (
    Folder,
    folder_name,
    link_folder,
    remove_folder,
    remove_older,
    run_directories,
    run_directory,
    write_folder,
)
from asyncrl.weights.threads import in_own_thread

TOUCHES = 4
"""The number of updates of the time stamp within the time that a server may take to load."""

logger = logging.getLogger(__name__)


class Folders:
    """The folders of weights of `run` for the servers of the actor `name`, in a new directory under `parent`.

    - `write_config` adds the model's configuration to a version that this process writes.
    - The newest versions are kept, and the versions that a server is loading.
    - A server may take `load_s` to load a version. A directory counts as abandoned if its time stamp was not updated
      for twice that time.

    Raises OSError: the directory cannot be made.
    """

    def __init__(
        self,
        parent: Path,
        write_config: Callable[[Path], object],
        run: RunIdentity,
        name: str = "actor",
        load_s: float = 300.0,
    ) -> None:
        self.directory = run_directory(parent, run) / f"{name}-{uuid.uuid4().hex}"
        self._parent = parent
        self._write_config = write_config
        self._run = run
        self._load_s = load_s
        self._readers: Counter[Path] = Counter()
        self._lock = Lock()
        self._closed = False
        self.directory.mkdir(parents=True)

    async def keep(self) -> None:
        """Call `tend` regularly; returns only by cancellation."""
        while True:
            await in_own_thread(self.tend)
            await asyncio.sleep(self._load_s / TOUCHES)

    def tend(self) -> None:
        """Update the time stamp of this process's directory, and remove abandoned directories."""
        if self._closed:
            return
        try:
            before = self.directory.stat().st_mtime
            os.utime(self.directory)
            # `now` and all time stamps are from the file system's clock, which may differ from this machine's.
            now = self.directory.stat().st_mtime
            if now - before > self._load_s:
                # This machine was suspended: its other actors might not have updated their directories yet.
                return
            old = now - 2 * self._load_s
            others = [each for run in run_directories(self._parent, self._run) for each in run.iterdir()]
        except OSError as error:
            logger.warning("could not update %s, or find abandoned directories next to it: %s", self.directory, error)
            return
        for other in others:
            _remove_if_older(other, old)

    def path(self, version: int) -> Path:
        """The folder of a version."""
        return self.directory / folder_name(version)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write the folder of `version` unless it exists, and return it. Raises WeightsError: it cannot be written."""
        with self._adding():
            try:
                if not self.path(version).exists():
                    write_folder(self.directory, version, tensors, self._write_config)
                    self._prune()
            except OSError as error:
                raise WeightsError(f"version {version} could not be written to disk: {error}") from error
        return self.path(version)

    def hold(self, folder: Folder) -> Folder:
        """Link the learner's folder under a second name, which stays when the learner removes its folder.

        Raises UnavailableError: the folder has been removed already. WeightsError: the link cannot be made.
        """
        with self._adding():
            try:
                held = link_folder(folder, self.directory)
                self._prune()
            except OSError as error:
                if not folder.path.exists():
                    raise UnavailableError(f"the folder {folder.path} was removed; a newer one will follow") from error
                raise WeightsError(
                    f"{folder.path} cannot be linked into {self.directory}, which must be writable here: {error}"
                ) from error
        return held

    def discard(self, version: int) -> None:
        """Remove the folder of `version`, if it exists, so that other weights of this version can take its place. A
        server that is loading it may fail. Raises WeightsError: it cannot be removed."""
        with self._adding():
            if self.path(version).exists():
                remove_folder(self.path(version))
            if self.path(version).exists():
                raise WeightsError(f"{self.path(version)} has weights that were refused, and cannot be removed")

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Keep a folder while a server may load it."""
        self._readers[path] += 1
        try:
            yield
        finally:
            self._readers[path] -= 1

    def close(self) -> None:
        """Wait for a version that is being written, then remove all versions. Nothing is written afterwards."""
        self._closed = True
        with self._lock:
            try:
                shutil.rmtree(self.directory)
            except OSError as error:
                logger.warning("%s could not be removed: %s", self.directory, error)

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Add one version at a time. Raises WeightsError: the fleet has been closed."""
        with self._lock:
            if self._closed:
                raise WeightsError("the fleet has been closed, and its folders are removed")
            yield

    def _prune(self) -> None:
        read = [path for path, readers in list(self._readers.items()) if readers]
        remove_older(self.directory, read)


def _remove_if_older(directory: Path, time_stamp: float) -> None:
    """Remove a directory that was last updated before `time_stamp`. A failure is logged."""
    try:
        if directory.stat().st_mtime < time_stamp:
            logger.info("removing the weights that a killed actor left in %s", directory)
            shutil.rmtree(directory)
    except FileNotFoundError:
        logger.debug("another actor has removed %s", directory)
    except OSError as error:
        logger.warning("could not remove the abandoned directory %s: %s", directory, error)
