"""An engine's end of the distributed route, by itself."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError, WireError
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.group import BroadcastCall, WeightGroup
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, Manifest, TensorSpec
from asyncrl.weights.requests import Requests
from asyncrl.wire import Message, decode, encode


class Calling:
    """A publisher that calls every engine to a broadcast of version 3, with so many tensors in each bucket."""

    endpoint = "nowhere"
    asked = 0

    def __init__(self, counts: tuple[int, ...] = (1, 2)) -> None:
        self.counts = counts

    async def ask(self, kind: str, body: Any) -> Message:
        self.asked += 1
        entries = tuple(TensorSpec(name, "float32", (1,)) for name in "abc")
        call = BroadcastCall(Manifest(3, MAX_CHUNK_BYTES, entries), self.counts, "127.0.0.1", 1, "g")
        return decode(encode(Message("broadcast", 1, call)))

    def reset(self) -> None:
        pass


class Group:
    closed = 0

    def __init__(self, hung: Future[dist.Work] | None = None) -> None:
        self.hung = hung

    def close(self) -> None:
        self.closed += 1


def route(publisher: Calling | None = None) -> DistributedRoute:
    return DistributedRoute(cast(Requests, publisher or Calling()), torch.device("cpu"), 1.0)


async def test_an_engine_that_is_called_to_a_broadcast_of_the_version_it_has_refuses() -> None:
    manifest = await route().newer_than(2)
    assert manifest is not None
    assert manifest.version == 3
    with pytest.raises(WireError, match="an engine at version 3 was called to a broadcast of 3"):
        await route().newer_than(3)


async def test_a_route_that_is_reset_closes_its_group_once() -> None:
    link, group = route(), Group()
    link._joined = ("g", cast(WeightGroup, group))
    link.reset()
    link.reset()
    assert group.closed == 1


async def test_an_engine_whose_broadcast_hangs_asks_to_join_another_only_once_that_one_has_ended() -> None:
    publisher, hung = Calling(), Future[dist.Work]()
    link = route(publisher)
    link._joined = ("g", cast(WeightGroup, Group(hung)))
    link.reset()
    with pytest.raises(UnavailableError, match="an earlier broadcast still hangs"):
        await link.newer_than(2)
    assert publisher.asked == 0
    hung.set_result(dist.Work())
    assert await link.newer_than(2) is not None


@pytest.mark.parametrize("counts", [(1, 1), (1, 3), ()])
async def test_a_call_whose_buckets_do_not_have_all_tensors_of_the_manifest_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(WireError, match=rf"have {sum(counts)} tensors, and its manifest has 3"):
        await route(Calling(counts)).newer_than(2)
