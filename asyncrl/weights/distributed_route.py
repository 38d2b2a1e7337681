"""The engine's end of the distributed route: joins the learner's group and receives broadcast buckets.

An engine asks the weight server to `join`, and gets a `BroadcastCall` before the first byte of a push. If the engine
missed a push, it cannot get that version by this route. The received buckets are a second copy of the weights, on
`device`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice

import msgspec
import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError, WeightsError, WireError
from asyncrl.network.interfaces import address_towards
from asyncrl.weights.buckets import Bucket
from asyncrl.weights.group import BACKENDS, BroadcastCall, WeightGroup, gpu_of, join_store, sum_of
from asyncrl.weights.manifest import Manifest, new_bytes
from asyncrl.weights.receiver import ExcludedError
from asyncrl.weights.requests import Requests
from asyncrl.weights.threads import in_own_thread

_CALL = msgspec.msgpack.Decoder(BroadcastCall)


class DistributedRoute:
    """Receives, on `device`, the broadcasts that the publisher at the other end of `requests` announces.

    `newer_than` and `fetch` raise UnavailableError if the learner is silent for `timeout_s` or began a push without
    this engine, or if another rank failed. They raise ExcludedError if this engine can never take part, for example
    because `device` has no room for a second version, and WireError if an answer is malformed. `make_group` makes the
    group of each push.
    """

    name = "distributed"

    def __init__(
        self,
        requests: Requests,
        device: torch.device,
        timeout_s: float,
        make_group: Callable[..., WeightGroup] = WeightGroup,
    ) -> None:
        self.endpoint = requests.endpoint
        self._requests = requests
        self._device = device
        self._timeout_s = timeout_s
        self._make_group = make_group
        self._membership = {"backend": BACKENDS[device.type], "gpu": gpu_of(device)}
        self._call: BroadcastCall | None = None
        self._joined: tuple[str, WeightGroup] | None = None
        self._hung: Future[dist.Work] | None = None
        self._store: tuple[tuple[str, int], dist.TCPStore] | None = None
        self.received = 0

    def reset(self) -> None:
        """Leave the group and drop the connection. The next call makes a new group and a new connection."""
        self._requests.reset()
        self._leave()
        self._store, self._call = None, None

    async def newer_than(self, version: int) -> Manifest | None:
        """Return the manifest of the next push, without checksums. None if no push begins within about a second."""
        if self._hung is not None and not self._hung.done():
            # An engine that is called and cannot take part would hold up the broadcast to all engines.
            raise UnavailableError("an earlier broadcast still hangs")
        reply = await self._requests.ask("join", {"holds": version, **self._membership})
        if reply.kind == "nothing":
            return None
        if reply.kind == "excluded":
            raise ExcludedError(str(reply.body.get("reason")))
        if reply.kind == "missed":
            raise UnavailableError("the newest version was broadcast before this engine joined")
        self._call = reply.read(_CALL)
        if self._call.manifest.version <= version:
            offered = self._call.manifest.version
            raise WireError(f"an engine at version {version} was called to a broadcast of {offered}")
        placed, count = sum(self._call.counts), len(self._call.manifest.tensors)
        if placed != count:
            raise WireError(f"the buckets of a broadcast have {placed} tensors, and its manifest has {count}")
        return self._call.manifest

    async def fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return all tensors of a manifest from `newer_than`. Raises WeightsError: a checksum does not match."""
        call, self._call = self._call, None
        if call is None or call.manifest != manifest:
            raise UnavailableError("this engine was not called to a push")
        try:
            tensors = await in_own_thread(partial(self._receive, call))
        except torch.OutOfMemoryError as error:
            raise ExcludedError(f"{self._device} has no room for a second version: {error}") from error
        self.received += manifest.nbytes
        return tensors

    def _receive(self, call: BroadcastCall) -> dict[str, torch.Tensor]:
        if self._device.type == "cuda":
            # A new thread's current device is the first GPU, even if the engine uses another one.
            torch.cuda.set_device(self._device)
        group = self._group(call)
        tensors: dict[str, torch.Tensor] = {}
        entries = iter(call.manifest.tensors)
        buckets = [Bucket(tuple(islice(entries, count))) for count in call.counts]
        flats = (new_bytes(bucket.nbytes, self._device) for bucket in buckets)
        theirs = torch.empty(len(buckets), dtype=torch.int64, device=self._device)
        arriving = group.transferred(chain(flats, [theirs]))
        own = []
        for bucket, flat in zip(buckets, arriving, strict=False):
            own.append(sum_of(flat))
            tensors |= bucket.views(flat)
        next(arriving)
        if not torch.equal(theirs, torch.stack(own)):
            raise WeightsError(f"version {call.manifest.version} arrived damaged: the checksums of its buckets differ")
        return tensors

    def _group(self, call: BroadcastCall) -> WeightGroup:
        if self._joined is not None and self._joined[0] == call.group:
            return self._joined[1]
        self._leave()
        place = (call.host, call.port)
        if self._store is None or self._store[0] != place:
            self._store = (place, join_store(*place, self._timeout_s))
        address = address_towards(*place)
        own = (call.group, call.rank, call.size, self._device, address, self._timeout_s)
        group = self._make_group(self._store[1], *own)
        self._joined = (call.group, group)
        return group

    def _leave(self) -> None:
        if self._joined is not None:
            _, group = self._joined
            group.close()
            self._hung, self._joined = group.hung, None
