"""One version of the weights on its way into servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import torch

from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.folders import Folder, Weights
from asyncrl.weights.staging import CPU, staged
from asyncrl.weights.threads import in_own_thread

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


class Update:
    """`version` as tensors on `device` or as a folder of `folders`, never changed; `label` names it towards servers.

    What it is not, it becomes when a transport asks for it, once for all servers.
    """

    def __init__(
        self, version: int, label: str, weights: Weights, folders: Folders | None = None, device: torch.device = CPU
    ) -> None:
        self.version = version
        self.label = label
        self._folders = folders
        self._tensors: _Once[Tensors] | Tensors
        self._path: _Once[Path] | Path
        if isinstance(weights, Folder):
            self._tensors, self._path = _Once(lambda: staged(weights.read(), device)), weights.path
        else:
            self._tensors, self._path = weights, _Once(lambda: self._written(weights))

    async def tensors(self) -> Tensors:
        """All tensors. Raises WeightsError: the folder that has them cannot be read."""
        if not isinstance(self._tensors, _Once):
            return self._tensors
        try:
            return await self._tensors.get()
        except UnavailableError as error:
            raise WeightsError(f"version {self.version} cannot be read: {error}") from error

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """The folder that holds this version, which stays meanwhile.

        Raises WeightsError: this actor writes none, or could not.
        """
        if self._folders is None:
            raise WeightsError("weights travel as tensors only; add disk to weights.transports")
        if not isinstance(self._path, _Once):
            with self._folders.reading(self._path) as path:
                yield path
            return
        with self._folders.reading(self._folders.path(self.version)) as path:
            await self._path.get()
            if not path.exists():
                self._path = _Once(self._path.make)
                await self._path.get()
            yield path

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A folder that this version came in stays, however long it takes until servers load it."""
        if self._folders is None or isinstance(self._path, _Once):
            yield
        else:
            with self._folders.reading(self._path):
                yield

    def _written(self, tensors: Tensors) -> Path:
        assert self._folders is not None
        return self._folders.write(self.version, tensors)


class _Once(Generic[T]):
    """What `make` gives, made in a thread when first asked for; a failure is told, and forgotten."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._task is None or (self._task.done() and self._task.exception()):
            self._task = asyncio.create_task(in_own_thread(self.make))
        return await asyncio.shield(self._task)
