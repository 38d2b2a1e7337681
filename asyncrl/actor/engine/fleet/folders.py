"""The folders from which the servers of one actor load: written by the actor, or the learner's under another name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch

from asyncrl.actor.engine.fleet.claims import Claim, remove_abandoned, unused_s
from asyncrl.errors import ConfigError, UnavailableError, WeightsError
from asyncrl.types import RunIdentity
from asyncrl.weights.folders import (
    Folder,
    folder_name,
    link_folder,
    remove_all,
    remove_folder,
    remove_older,
    versions_in,
    write_folder,
)

PREDECESSOR_S = 15.0
"""An actor of the same name that is just being stopped is waited for."""


class Folders:
    """Versions of `run` under `directory`, which is this actor's alone, with what `write_config` writes.

    Those of the learner are held under `held`, by default there as well: on the learner's file system it takes no
    second copy. What servers are reading is never removed. Of the others the newest are kept, as weights/folders.py
    says; so a late joiner always finds the newest. A directory is made when it is needed: an empty one where the
    learner's should be would look as if there were no weights yet.

    What an earlier life of this actor, or other actors of this run and machine, left when they were killed is removed
    too, once no server that they had load it can be at it any more: a server is given `load_s` (see claims.py). `clock`
    gives seconds.

    Raises ConfigError: another process, which lives, or another run has such a directory. OSError: what an earlier life
    left cannot be removed.
    """

    def __init__(
        self,
        directory: Path,
        write_config: Callable[[Path], object],
        run: RunIdentity,
        held: Path | None = None,
        load_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._held = held or directory
        self._write_config = write_config
        self._run = run
        self._load_s = load_s
        self._readers: Counter[Path] = Counter()
        self._clock = clock
        self._lock = Lock()
        self._closed = False
        self._claims = {each: Claim(each, run) for each in (self._directory, self._held)}
        self._inherited: dict[Path, float] = {}
        """Versions of an earlier life, and when they may go."""
        for each in self._claims:
            self._take_over(each)
            remove_abandoned(each.parent, run, load_s)

    def path(self, version: int) -> Path:
        """Where `write` puts a version."""
        return self._directory / folder_name(version)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """The folder of `version`, written now. Raises WeightsError."""
        with self._adding_to(self._directory):
            try:
                folder = write_folder(self._directory, version, tensors, self._write_config, self._run)
                self._prune(folder)
            except OSError as error:
                raise WeightsError(f"version {version} could not be written to disk: {error}") from error
        return folder

    def hold(self, folder: Folder) -> Folder:
        """The learner's folder under a name of our own, since the learner removes it when it likes.

        Raises UnavailableError: it has gone already. WeightsError: it cannot have another name.
        """
        with self._adding_to(self._held):
            try:
                held = link_folder(folder, self._held, self._run)
                self._prune(held.path)
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
        """Remove all of them, once the version that is being written is; there will be no other."""
        self._closed = True
        with self._lock:
            for claim in self._claims.values():
                claim.remove()

    def _take_over(self, directory: Path) -> None:
        """Claim what an earlier life left and remove it, unless a server may still be loading it."""
        if not directory.exists():
            return
        until = self._clock() + self._load_s - unused_s(directory)
        self._claims[directory].make(PREDECESSOR_S)
        if self._clock() <= until:
            self._inherited |= dict.fromkeys(versions_in(directory, self._run).values(), until)
        remove_all(directory, self._run, self._inherited)

    @contextmanager
    def _adding_to(self, directory: Path) -> Iterator[None]:
        """One version at a time, in a directory that is ours. Raises WeightsError."""
        with self._lock:
            if self._closed:
                raise WeightsError("the fleet has been closed, its folders are gone")
            try:
                self._claims[directory].make()
            except ConfigError as error:
                raise WeightsError(str(error)) from error
            yield

    def _prune(self, newest: Path) -> None:
        self._inherited.pop(newest, None)
        for path in [path for path, until in self._inherited.items() if self._clock() > until]:
            remove_folder(path, self._run)
            del self._inherited[path]
        read = [path for path, readers in list(self._readers.items()) if readers]
        remove_older(newest.parent, self._run, read, self._inherited)
        remove_abandoned(newest.parent.parent, self._run, self._load_s)
