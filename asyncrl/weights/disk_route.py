"""The engine's end of the disk route: it reads folders on a file system that learner and engine share."""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncrl.errors import UnavailableError
from asyncrl.types import RunIdentity
from asyncrl.weights.folders import Folder, Weights, read_folder, run_directories, versions_in
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.threads import in_own_thread

POLL_S = 0.1
POLLS = 10


class DiskRoute:
    """Fetches the newest version of `run` under `directory` (see folders.py): its tensors if `read`, else only the
    folder. `newer_than` and `fetch` raise UnavailableError if no learner of the run writes there, or a folder was
    removed meanwhile.
    """

    name = "disk"

    def __init__(self, directory: Path, run: RunIdentity, *, read: bool = True) -> None:
        self.endpoint = str(directory)
        self._directory = directory
        self._run = run
        self._reads = read
        self.received = 0

    def reset(self) -> None:
        """Do nothing: there is no connection to drop."""

    async def newer_than(self, version: int) -> Manifest | None:
        """Return the newest manifest as soon as it is newer than `version`, or None after about a second."""
        for _ in range(POLLS):
            found = self._folders()
            if found and (newest := max(found)) > version:
                return read_folder(found[newest], newest).manifest
            await asyncio.sleep(POLL_S)
        return None

    async def fetch(self, manifest: Manifest) -> Weights:
        """Fetch the version of a manifest. Raises WeightsError: a checksum differs, or, without `read`, a file is not
        whole."""
        path = self._folders().get(manifest.version)
        if path is None:
            raise UnavailableError(f"the folder of version {manifest.version} was removed; a newer one will follow")
        folder = Folder(path, manifest)
        if not self._reads:
            await in_own_thread(folder.check)
            return folder
        tensors = await in_own_thread(folder.read)
        self.received += manifest.nbytes
        return tensors

    def _folders(self) -> dict[int, Path]:
        try:
            directories = list(run_directories(self._directory, self._run))
        except OSError as error:
            raise UnavailableError(f"the learner's weights cannot be read on this machine: {error}") from error
        if not directories:
            raise UnavailableError(
                f"as seen from this machine, no learner of run {self._run} writes to {self._directory}"
            )
        return {version: path for directory in directories for version, path in versions_in(directory).items()}
