"""An engine's end of the distributed route, by itself."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from asyncrl.errors import WireError
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.group import BroadcastCall, WeightGroup
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, Manifest
from asyncrl.weights.requests import Requests
from asyncrl.wire import Message, decode, encode


class Calling:
    """A publisher that calls every engine to a broadcast of version 3."""

    endpoint = "nowhere"

    async def ask(self, kind: str, body: Any) -> Message:
        call = BroadcastCall(Manifest(3, MAX_CHUNK_BYTES, ()), (), "127.0.0.1", 1, "g")
        return decode(encode(Message("broadcast", 1, call)))

    def reset(self) -> None:
        pass


class Group:
    hung = None
    closed = 0

    def close(self) -> None:
        self.closed += 1


def route() -> DistributedRoute:
    return DistributedRoute(cast(Requests, Calling()), torch.device("cpu"), 1.0)


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
