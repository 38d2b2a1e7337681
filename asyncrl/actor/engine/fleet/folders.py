"""The folders from which the servers of one actor load: written by the actor, or the learner's under another name."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from asyncrl.actor.engine.fleet.claims import Claim, remove_abandoned
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.folders import Folder, folder_name, link_folder, remove_all, remove_older, write_folder


class Folders:
    """Versions under `directory`, which is this actor's alone, with the configuration that `write_config` writes.

    Those of the learner are held under `held`, by default there as well: on the learner's file system it takes no
    second copy. What servers are reading is never removed. Of the others the newest are kept, as weights/folders.py
    says; so a late joiner always finds the newest. A directory is made when it is needed: an empty one where the
    learner's should be would look as if there were no weights yet.

    What other actors of this machine left when they were killed is removed too, once no server that they had load it
    can be at it any more: a server is given `load_s` (see claims.py).

    Raises OSError: what an earlier life left cannot be removed.
    """

    def __init__(
        self,
        directory: Path,
        write_config: Callable[[Path], object],
        held: Path | None = None,
        load_s: float = 300.0,
    ) -> None:
        self._directory = directory
        self._held = held or directory
        self._write_config = write_config
        self._load_s = load_s
        self._readers: Counter[Path] = Counter()
        self._claims = {each: Claim(each) for each in (self._directory, self._held)}
        for each in self._claims:
            remove_all(each)
            remove_abandoned(each.parent, load_s)

    def path(self, version: int) -> Path:
        """Where `write` puts a version."""
        return self._directory / folder_name(version)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """The folder of `version`, written now. Raises WeightsError."""
        self._claims[self._directory].make()
        try:
            folder = write_folder(self._directory, version, tensors, self._write_config)
            self._prune(self._directory)
        except OSError as error:
            raise WeightsError(f"version {version} could not be written to disk: {error}") from error
        return folder

    def hold(self, folder: Folder) -> Folder:
        """The learner's folder under a name of our own, since the learner removes it when it likes.

        Raises UnavailableError: it has gone already. WeightsError: it cannot have another name.
        """
        self._claims[self._held].make()
        try:
            held = link_folder(folder, self._held)
            self._prune(self._held)
        except OSError as error:
            if not folder.path.exists():
                raise UnavailableError(f"{folder.path} has gone; a newer one will follow") from error
            raise WeightsError(
                f"{folder.path} cannot be held in {self._held}, which must be writable here: {error}"
            ) from error
        return held

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """Keep a folder for as long as a server loads it."""
        self._readers[path] += 1
        for claim in self._claims.values():
            claim.use()
        try:
            yield path
        finally:
            self._readers[path] -= 1

    def close(self) -> None:
        """Remove all of them."""
        for directory, claim in self._claims.items():
            shutil.rmtree(directory, ignore_errors=True)
            claim.end()

    def _prune(self, directory: Path) -> None:
        remove_older(directory, [path for path, readers in list(self._readers.items()) if readers])
        remove_abandoned(directory.parent, self._load_s)
