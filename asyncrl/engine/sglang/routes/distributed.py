"""Broadcasts in a process group with the ranks of one server: gloo from the CPU, NCCL from a GPU.

The actor is rank 0, and every server has its own group, so a server that dies does not delay other servers. A group
lasts until something fails or the server joins again; the next group has another name. The prefixes of a group's keys
in the store must agree with SGLang's `init_custom_process_group` and torch's groups, so both sides need about the same
version of torch.

Each call into torch that waits for the server runs in a new thread, since NCCL may never return.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config.bind import SERVER_GROUP_FIX, check_bind
from asyncrl.engine.fleet.http import ServerRefusedError
from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.sglang.routes.base import BucketServerRoute, ServerEnd
from asyncrl.errors import ConfigError, EngineError, UnavailableError
from asyncrl.network.interfaces import address_towards
from asyncrl.weights.group import BACKENDS, WeightGroup, join_store, open_store
from asyncrl.weights.threads import OwnThreads

FORGET_S = 5.0
END_S = 5.0
"""Seconds that a reset waits for calls into torch. The calls end at once if the server has died or has dropped the
group. If the server still has the group, they end by their own time limit, or with NCCL perhaps never."""


@dataclass(slots=True)
class _Joined:
    """A group, and the `store` through which its ranks connect. The store must live as long as the group."""

    name: str
    store: dist.TCPStore
    group: WeightGroup


class DistributedServerRoute(BucketServerRoute):
    """Broadcasts from `device` to `/update_weights_from_distributed`; the server may be silent for `timeout_s`.

    torch's store, by which the ranks find each other, cannot encrypt. So it listens beyond loopback only if the network
    is declared `insecure`. `make_group` makes the actor's end of a group. `own_address` finds the address by which the
    server reaches this machine.
    """

    def __init__(
        self,
        end: ServerEnd,
        device: torch.device,
        bucket_bytes: int,
        timeout_s: float,
        insecure: bool,
        make_group: Callable[..., WeightGroup] = WeightGroup,
        own_address: Callable[[str, int], str] = address_towards,
    ) -> None:
        super().__init__(end, device, bucket_bytes)
        self._timeout_s = timeout_s
        self._insecure = insecure
        self._make_group = make_group
        self._own_address = own_address
        self._joined: _Joined | None = None
        self._left: list[str] = []
        self._threads = OwnThreads()

    async def send(self, update: Update) -> None:
        async with self.end.updating():
            joined = self._joined = self._joined or await self._join()
            try:
                async with aclosing(self.buckets(update)) as made:
                    async for bucket, flat, body in made:
                        announced = {
                            **body,
                            "group_name": joined.name,
                            "names": [entry.name for entry in bucket.entries],
                            "dtypes": [entry.dtype for entry in bucket.entries],
                            "shapes": [entry.shape for entry in bucket.entries],
                        }
                        post = self.end.post("/update_weights_from_distributed", announced)
                        await self._together(post, self._threads.run(partial(_send, joined.group, flat, self.device)))
            except BaseException:
                # The actor leaves the group at once: a server that waits for further tensors would not answer the end
                # of the update.
                self._leave()
                raise

    async def reset(self) -> None:
        await super().reset()
        self._leave()
        await self._forget()
        await self._threads.ended(END_S)

    async def _join(self) -> _Joined:
        """Form a group with the server. Raises ServerRefusedError: it cannot be formed; ServerFaultError: the server
        failed."""
        await self._forget()
        try:
            address = await self._threads.run(partial(self._own_address, *self.end.address))
            check_bind(address, self._insecure, key="the store's address", fix=SERVER_GROUP_FIX)
            store, port = await self._threads.run(partial(open_store, address, self._timeout_s))
            client = await self._threads.run(partial(join_store, address, port, self._timeout_s))
        except (ConfigError, OSError, UnavailableError) as error:
            raise ServerRefusedError(f"no group can be formed with {self.end.url}: {error}") from error
        name, ranks = f"asyncrl-{uuid.uuid4().hex}", 1 + self.end.ranks
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": ranks,
            "group_name": name,
            "backend": BACKENDS[self.device.type],
        }
        form = partial(_form, self._make_group, client, address, name, ranks, self.device, self._timeout_s)
        forming = self._threads.run(form)
        try:
            await self._together(self.end.post("/init_weights_update_group", body, self._timeout_s), forming)
        except BaseException:
            # `del` ends the store. Its clients notice the end, and stop waiting for other ranks.
            del store
            raise
        return _Joined(name, store, forming.result())

    async def _together(self, post: Coroutine[Any, Any, None], ours: asyncio.Future[Any]) -> None:
        """Wait for both sides of one exchange. The first error ends the wait; of two errors, the server's is raised."""
        both = (asyncio.ensure_future(post), ours)
        try:
            done, _ = await asyncio.wait(both, timeout=self.end.load_s, return_when=asyncio.FIRST_EXCEPTION)
            for each in both:
                if each in done:
                    each.result()
            if len(done) < len(both):
                raise ServerFaultError(f"{self.end.url} was silent for {self.end.load_s:g} s in a group")
        except UnavailableError as error:
            raise ServerFaultError(f"{self.end.url}: {error}") from error
        finally:
            for each in both:
                if not each.cancel() and not each.cancelled():
                    each.exception()

    def _leave(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            self._left.append(joined.name)
            self._threads.run(joined.group.close)

    async def _forget(self) -> None:
        """Let the server drop the groups that this process has left. A restarted server does not know them."""
        left, self._left = self._left, []
        for name in left:
            with suppress(EngineError):
                await self.end.post("/destroy_weights_update_group", {"group_name": name}, FORGET_S)


def _form(
    make_group: Callable[..., WeightGroup],
    client: dist.Store,
    address: str,
    name: str,
    ranks: int,
    device: torch.device,
    timeout_s: float,
) -> WeightGroup:
    """Form the actor's end of the group."""
    # Keys begin with SGLang's prefix, which is the name of the group. Then come torch's two prefixes: the name again,
    # and the device type.
    _use(device)
    store = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, client))
    return make_group(store, f"{device.type}/", 0, ranks, device, address, timeout_s)


def _send(group: WeightGroup, flat: torch.Tensor, device: torch.device) -> None:
    _use(device)
    group.finish(group.begin(flat))


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        # A new thread's current device is the first GPU.
        torch.cuda.set_device(device)
