"""The base of all routes into a server: their view of the server, and buckets, of which one is filled while another is
sent."""

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
"""The maximum seconds for the call that ends a failed update."""


@dataclass(slots=True)
class ServerEnd:
    """One server, with the data that the routes into it need.

    - `load_s`: the seconds that a call of an update may take
    - `spans`, known once the server has joined: true if updates have begin and end calls (see server.py)
    - `ranks`, known once the server has joined: the server's number of GPUs
    - `keeps_none`: the reason why the server keeps no buffer of the actor open (see kept.py); "" once a server has
      joined that keeps one
    """

    url: str
    http: Http
    load_s: float
    spans: bool = False
    ranks: int = 1
    keeps_none: str = "it has not joined"

    @property
    def address(self) -> tuple[str, int]:
        """The server's host and port."""
        url = urlsplit(self.url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> None:
        """Post `body` to the server. Raises: see `Http.call`."""
        await self.http.post(path, body, self.load_s if timeout_s is None else timeout_s)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Begin and end an update, if the server has such calls."""
        if not self.spans:
            yield
            return
        await self.post("/begin_weight_update", timeout_s=CONTROL_S)
        try:
            yield
        except BaseException:
            # An error of the end call must not replace the first error, which may be a cancellation.
            with suppress(EngineError):
                await self.post("/end_weight_update", timeout_s=END_S)
            raise
        await self.post("/end_weight_update", timeout_s=CONTROL_S)


class ServerRoute(ABC):
    """A route of weights into the server at `end`.

    `prepare` and `send` raise ServerRefusedError if the server takes no weights by this route, and WeightsError if the
    update cannot be read or converted.
    """

    def __init__(self, end: ServerEnd) -> None:
        self.end = end

    @abstractmethod
    async def prepare(self, update: Update) -> None:
        """Prepare the update for `send`, while the server keeps generating."""

    @abstractmethod
    async def send(self, update: Update) -> None:
        """Send the whole update. Raises ServerFaultError: the server failed, and its weights are unknown."""

    async def reset(self) -> None:
        """Forget the state shared with the server, which joins again or leaves the fleet."""


class DiskServerRoute(ServerRoute):
    """Sends the path of a Hugging Face folder to `/update_weights_from_disk`, which needs no begin and end calls."""

    async def prepare(self, update: Update) -> None:
        await update.folder()

    async def send(self, update: Update) -> None:
        body = {"model_path": str(await update.folder()), "weight_version": update.label, "flush_cache": False}
        await self.end.post("/update_weights_from_disk", body)


Filled = tuple[Bucket, torch.Tensor, Mapping[str, Any]]
"""A bucket, its buffer, and the fields of its request."""


class BucketServerRoute(ServerRoute):
    """Sends the tensors in buckets on `device`. The first bucket is filled before the server stops, and each later
    bucket while the bucket before it is sent."""

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
        """Plan the buckets of `update`, in their order."""
        return tight_buckets(update.specs, self.bucket_bytes, request_group)

    async def source(self, update: Update) -> torch.device:
        """The device of the tensors from which buckets are filled: the buckets' device, or the CPU."""
        return self.device

    async def reset(self) -> None:
        await self._drop()

    def has_first(self, update: Update) -> bool:
        """True if the first bucket of `update` is prepared."""
        return self._prepared is not None and self._prepared.update is update

    async def buckets(self, update: Update) -> AsyncGenerator[Filled, None]:
        """Yield the buckets of `update`, first the prepared one. Keeps no reference to a buffer."""
        if not self.has_first(update):
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
    """The first bucket of `update`, and the generator of its remaining buckets."""

    update: Update
    made: AsyncGenerator[Filled, None]
    first: list[Filled]


async def bucketed(
    update: Update, buckets: Sequence[Bucket], device: torch.device, source: torch.device, all_labelled: bool = False
) -> AsyncGenerator[Filled, None]:
    """Yield the filled `buckets` on `device`. They are filled from tensors on `source`, which is `device` or the CPU.

    A thread fills the next buffer while the buffer before it is in use. The last bucket has the update's label, which
    names the weights once all are loaded. With `all_labelled` each bucket has the label, so that an answer shows if any
    part of the update was loaded before the answer.
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
    """Flatten a bucket as `flatten` does, from tensors on the CPU to a buffer on `device`."""
    flat = new_bytes(bucket.nbytes, device)
    fill_from_host(flat, bucket, tensors)
    return flat


def fill_from_host(flat: torch.Tensor, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the bucket's tensors, which are on the CPU, into its buffer on any device."""
    views = bucket.views(flat)
    copy_from_host([tensors[name].detach() for name in views], list(views.values()))
