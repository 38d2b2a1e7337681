"""What every transport needs: the server's end, and buckets, each of which is made while the one before is sent."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch

from asyncrl.engine.fleet.http import Http
from asyncrl.engine.fleet.update import Update, copy_from_host
from asyncrl.engine.sglang.families import request_group
from asyncrl.errors import EngineError
from asyncrl.weights.buckets import Bucket, flatten, tight_buckets
from asyncrl.weights.manifest import new_bytes
from asyncrl.weights.threads import in_own_thread

CONTROL_S = 30.0
END_S = 5.0
"""For the end of an update that failed."""


@dataclass(slots=True)
class ServerEnd:
    """One server as its transports see it.

    A call of an update may take `load_s`. `spans` (whether updates have a begin and an end, see server.py) and `ranks`,
    the number of GPUs that it is spread over, are known once it has joined.
    """

    url: str
    http: Http
    load_s: float
    spans: bool = False
    ranks: int = 1

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        url = urlsplit(self.url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> None:
        """Raises ServerFaultError and ServerRefusedError."""
        await self.http.post(path, body, self.load_s if timeout_s is None else timeout_s)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Begin and end an update, where the server knows that."""
        if not self.spans:
            yield
            return
        await self.post("/begin_weight_update", timeout_s=CONTROL_S)
        try:
            yield
        except BaseException:
            # The first error is raised and not that of the end; a cancellation must stay one.
            with suppress(EngineError):
                await self.post("/end_weight_update", timeout_s=END_S)
            raise
        await self.post("/end_weight_update", timeout_s=CONTROL_S)


class ServerRoute(ABC):
    """One way into the server at `end`. Both calls raise ServerRefusedError where the server takes no weights this way,
    and WeightsError where the update cannot be had in this form."""

    def __init__(self, end: ServerEnd) -> None:
        self.end = end

    @abstractmethod
    async def prepare(self, update: Update) -> None:
        """Make ready what `send` takes, while the server goes on."""

    @abstractmethod
    async def send(self, update: Update) -> None:
        """Bring the server to the whole update. Raises ServerFaultError: it failed, and its weights are unknown."""

    async def reset(self) -> None:
        """Forget what was agreed with the server: it joins anew, or leaves the fleet."""


class DiskServerRoute(ServerRoute):
    """Names a Hugging Face folder to `/update_weights_from_disk`, which needs no begin and end."""

    async def prepare(self, update: Update) -> None:
        await update.folder()

    async def send(self, update: Update) -> None:
        body = {"model_path": str(await update.folder()), "weight_version": update.label, "flush_cache": False}
        await self.end.post("/update_weights_from_disk", body)


Filled = tuple[Bucket, torch.Tensor, Mapping[str, Any]]
"""A bucket, its buffer, and what a request says of every bucket."""


class BucketServerRoute(ServerRoute):
    """Sends the tensors by buckets on `device`. When the server stops, the first one is full, and the second is being
    filled."""

    def __init__(self, end: ServerEnd, device: torch.device, bucket_bytes: int) -> None:
        super().__init__(end)
        self.device = device
        self.bucket_bytes = bucket_bytes
        self._prepared: _Prepared | None = None

    async def prepare(self, update: Update) -> None:
        await self._drop()
        made = bucketed(update, self.plan(update), self.device, await self.source(update), not self.end.spans)
        self._prepared = _Prepared(update, made, [await anext(made)])

    def plan(self, update: Update) -> list[Bucket]:
        """The buckets by which `update` goes, in their order."""
        return tight_buckets(update.specs, self.bucket_bytes, request_group)

    async def source(self, update: Update) -> torch.device:
        """Where the tensors are from which the buckets are filled: there, or on the CPU."""
        return self.device

    async def reset(self) -> None:
        await self._drop()

    async def buckets(self, update: Update) -> AsyncGenerator[Filled, None]:
        """What was prepared of `update`, and the rest. Keeps no buffer that it has given."""
        if self._prepared is None or self._prepared.update is not update:
            await self.prepare(update)
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        async with aclosing(prepared.made) as made:
            with suppress(StopAsyncIteration):
                yield prepared.first.pop()
                while True:
                    yield await anext(made)

    async def _drop(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            await prepared.made.aclose()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The buckets of `update` that are still to come, and the `first` one."""

    update: Update
    made: AsyncGenerator[Filled, None]
    first: list[Filled]


async def bucketed(
    update: Update, buckets: Sequence[Bucket], device: torch.device, source: torch.device, all_labelled: bool = False
) -> AsyncGenerator[Filled, None]:
    """The tensors by `buckets` on `device`, filled from what is on `source`, which is there or on the CPU.

    A thread fills the next buffer while one is in use. The last bucket comes with the update's label, which names the
    weights once it is loaded. With `all_labelled` each one does: then an answer shows that a part was loaded before it.
    """
    tensors = await update.tensors(source)
    body = {"load_format": "flattened_bucket", "flush_cache": False}
    if all_labelled:
        body["weight_version"] = update.label
    fill = flatten if source == device else partial(_from_host, device)

    def begin(index: int) -> asyncio.Task[torch.Tensor]:
        return asyncio.create_task(in_own_thread(partial(fill, buckets[index], tensors)))

    ahead = begin(0)
    try:
        for index in range(1, len(buckets)):
            flat, ahead = await ahead, begin(index)
            yield buckets[index - 1], flat, body
            del flat
        yield buckets[-1], await ahead, {**body, "weight_version": update.label}
    finally:
        ahead.cancel()


def _from_host(device: torch.device, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As `flatten`, with the buffer on `device` and the tensors on the CPU."""
    flat = new_bytes(bucket.nbytes, device)
    views = bucket.views(flat)
    copy_from_host([tensors[name].detach() for name in views], list(views.values()))
    return flat
