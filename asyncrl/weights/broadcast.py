"""The learner's end of the distributed route: broadcasts buckets to the engines that are connected when a push begins.

The members of each push are chosen in the weight server's thread (see transfers.py). An engine that has asked to join
gets a `BroadcastCall` before the first byte, with everything that it needs for the broadcast. If an engine fails, the
broadcast ends after at most `timeout_s`. Engines that had not joined, or that lack a part of the version when a
broadcast ends early, take the version by zmq.

A bucket on the CPU is part of the version's host copy, so it can be sent while the next bucket is filled. A bucket on a
GPU must be sent before its buffer is filled again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain

import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError
from asyncrl.weights.buckets import Bucket, GatheredBucket
from asyncrl.weights.canary import Canary
from asyncrl.weights.group import AT_ONCE, BACKENDS, BroadcastCall, WeightGroup, open_store, sum_of
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, Manifest
from asyncrl.weights.server import WeightServer

PATIENCE_S = 1.0

logger = logging.getLogger(__name__)


class Broadcaster:
    """Calls engines through `server` and broadcasts to them from `device`. The engines connect to this learner at
    `host`.

    `make_group` makes the process group of a broadcast. An engine asks to join again and again until a push begins. A
    push waits at most `patience_s` for an engine that is between two such requests.
    """

    def __init__(
        self,
        server: WeightServer,
        host: str,
        device: torch.device,
        timeout_s: float,
        make_group: Callable[..., WeightGroup] = WeightGroup,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._server = server
        self._patience_s = patience_s
        self._host = host
        self._device = device
        self._timeout_s = timeout_s
        self._make_group = make_group
        self._store, self._port = open_store(host, timeout_s)
        self._members: Sequence[bytes] = ()
        self._name = ""
        self._group: WeightGroup | None = None
        self._works: list[dist.Work] = []
        self._hung: Future[dist.Work] | None = None
        self.broadcasts = 0
        self.failures = 0

    def through(
        self,
        version: int,
        plan: Sequence[Bucket],
        buckets: Iterable[GatheredBucket],
        canary: Canary | None = None,
    ) -> Iterator[GatheredBucket]:
        """Yield the `buckets` of `version`, and broadcast them meanwhile to the engines that have joined."""
        entries = tuple(chain(*(bucket.entries for bucket in plan)))
        self._call_engines(Manifest(version, MAX_CHUNK_BYTES, entries, canary=canary), plan)
        sums = []
        for gathered in buckets:
            self._begin(gathered.flat)
            if self._group is not None:
                sums.append(sum_of(gathered.flat))
            yield gathered
            if gathered.flat.is_cuda:
                self._finish_all_but(0)
        if self._group is not None:
            self._begin(torch.stack(sums))
            self._finish_all_but(0)
            self.broadcasts += self._group is not None

    def close(self) -> None:
        self._drop()

    def _call_engines(self, manifest: Manifest, plan: Sequence[Bucket]) -> None:
        if self._hung is not None and not self._hung.done():
            logger.warning("no broadcast, since an earlier one still hangs: engines take the version by zmq")
            return
        backend = BACKENDS[self._device.type]
        members = self._server.call(backend, lambda members: self._call(manifest, plan, members), self._patience_s)
        if not members:
            self._drop()
        elif self._group is None:
            try:
                own = (self._name, 0, len(members) + 1, self._device, self._host, self._timeout_s)
                self._group = self._make_group(self._store, *own)
            except UnavailableError as error:
                self._fail(str(error))

    def _begin(self, tensor: torch.Tensor) -> None:
        """Wait until at most one earlier tensor is still being sent. Then begin to send `tensor`."""
        self._finish_all_but(AT_ONCE - 1)
        if self._group is not None:
            try:
                self._works.append(self._group.begin(tensor))
            except UnavailableError as error:
                self._fail(str(error))

    def _finish_all_but(self, newest: int) -> None:
        while self._group is not None and len(self._works) > newest:
            try:
                self._group.finish(self._works.pop(0))
            except UnavailableError as error:
                self._fail(str(error))

    def _call(self, manifest: Manifest, plan: Sequence[Bucket], members: Sequence[bytes]) -> BroadcastCall:
        """Make the `BroadcastCall` for these engines. The server's thread runs this method, while `_call_engines` waits
        for the result."""
        if members != self._members or self._group is None:
            self._drop()
            self._members, self._name = members, uuid.uuid4().hex
        counts = tuple(len(bucket.entries) for bucket in plan)
        return BroadcastCall(manifest, counts, self._host, self._port, self._name)

    def _fail(self, reason: str) -> None:
        self.failures += 1
        logger.warning(
            "a broadcast to %d engines failed; engines that lack a part of the version take it by zmq: %s",
            len(self._members),
            reason,
        )
        self._drop()

    def _drop(self) -> None:
        self._works = []
        if self._group is not None:
            self._group.close()
            self._hung, self._group = self._group.hung, None
