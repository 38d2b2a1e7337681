"""The learner's end of the distributed channel: broadcasts buckets to the engines that are there when a push begins.

The members are chosen anew for each push, in the weight server's thread (see transfers.py): engines ask to join, and
are called with everything that they need before the first byte. An engine that fails ends the broadcast, after
`timeout_s` at most. Engines that were away, or lack any of the version when a broadcast ends early, take it by zmq.

A bucket on the CPU is part of the version's host copy, so it is sent while the next one is filled. A bucket on a GPU
must be sent before its buffer is filled again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError
from asyncrl.weights.buckets import Bucket, GatheredBucket
from asyncrl.weights.group import AT_ONCE, BACKENDS, WeightGroup, open_store, sum_of
from asyncrl.weights.server import WeightServer

PATIENCE_S = 1.0
"""How long a push waits for an engine that asked to join a moment ago, and is between two requests."""

logger = logging.getLogger(__name__)


class Broadcaster:
    """Calls engines through `server` and broadcasts to them from `device`; they find this learner at `host`.

    `make_group` makes the group of each call.
    """

    def __init__(
        self,
        server: WeightServer,
        host: str,
        device: torch.device,
        timeout_s: float,
        make_group: Callable[..., WeightGroup] = WeightGroup,
    ) -> None:
        self._server = server
        self._host = host
        self._device = device
        self._timeout_s = timeout_s
        self._make_group = make_group
        self._store, self._port = open_store(host, timeout_s)
        self._members: Sequence[bytes] = ()
        self._name = ""
        self._group: WeightGroup | None = None
        self._sums: list[torch.Tensor] = []
        self._works: list[dist.Work] = []
        self._hung: Future[dist.Work] | None = None
        self.broadcasts = 0
        self.failures = 0

    def begin(self, version: int, plan: Sequence[Bucket]) -> None:
        """Call the engines that are there to the buckets of `version`. Without any, the other calls do nothing."""
        if self._hung is not None and not self._hung.done():
            logger.warning("no broadcast: an earlier one still hangs, engines take the version by zmq")
            return
        backend = BACKENDS[self._device.type]
        members = self._server.call(backend, lambda members: self._call(version, plan, members), PATIENCE_S)
        self._sums = []
        if not members:
            self._drop()
        elif self._group is None:
            try:
                size = len(members) + 1
                own = (self._name, 0, size, self._device, self._host, self._timeout_s)
                self._group = self._make_group(self._store, *own)
            except UnavailableError as error:
                self._fail(str(error))

    def start(self, filled: GatheredBucket) -> None:
        """Begin to send a bucket, which must stay as it is until `wait` or `commit`. Waits for the last but one."""
        self._start(filled.flat)
        if self._group is not None:
            self._sums.append(sum_of(filled.flat))

    def wait(self) -> None:
        """Return once all buckets so far are sent, or one has failed."""
        self._finish_all_but(0)

    def commit(self) -> None:
        """After the last bucket: let the engines have the version."""
        if self._group is not None:
            self._start(torch.stack(self._sums))
            self.wait()
            self.broadcasts += self._group is not None

    def close(self) -> None:
        self._drop()

    def _start(self, tensor: torch.Tensor) -> None:
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

    def _call(self, version: int, plan: Sequence[Bucket], members: Sequence[bytes]) -> dict[str, Any]:
        """The call to the engines, made in the server's thread while `begin` waits for it."""
        if members != self._members or self._group is None:
            self._drop()
            self._members, self._name = members, uuid.uuid4().hex
        buckets = [[[entry.name, entry.dtype, list(entry.shape)] for entry in bucket.entries] for bucket in plan]
        return {"version": version, "buckets": buckets, "host": self._host, "port": self._port, "group": self._name}

    def _fail(self, reason: str) -> None:
        self.failures += 1
        logger.warning(
            "a broadcast to %d engines failed; those that lack any of it use zmq: %s",
            len(self._members),
            reason,
        )
        self._drop()

    def _drop(self) -> None:
        self._works = []
        if self._group is not None:
            self._group.close()
            self._hung, self._group = self._group.hung, None
