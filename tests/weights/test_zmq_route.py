"""An engine's end of the ZeroMQ route, by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, Manifest, TensorSpec
from asyncrl.weights.requests import Requests
from asyncrl.weights.zmq_route import ZmqRoute
from asyncrl.wire import Message, decode, encode


class Offering:
    """A publisher that offers version 3 to everybody, and whose chunks lack their last byte."""

    endpoint = "nowhere"

    async def send(self, kind: str, body: Mapping[str, int]) -> int:
        self._size = body["stop"] - body["start"]
        return 1

    async def receive(self, sequence: int) -> Message:
        return Message("chunk", sequence, {}, {"0": np.zeros(self._size - 1, np.uint8)})

    async def ask(self, kind: str, body: Any) -> Message:
        return decode(encode(Message("manifest", 1, Manifest(3, MAX_CHUNK_BYTES, ()))))


async def test_an_engine_that_is_offered_the_version_it_has_refuses() -> None:
    link = ZmqRoute(cast(Requests, Offering()))
    manifest = await link.newer_than(2)
    assert manifest is not None
    assert manifest.version == 3
    with pytest.raises(WireError, match="asked for a version newer than 3, the publisher offers 3"):
        await link.newer_than(3)


async def test_a_chunk_that_is_too_short_is_named_as_such() -> None:
    manifest = Manifest(3, MAX_CHUNK_BYTES, (TensorSpec("a", "uint8", (8,)),))
    with pytest.raises(WireError, match="did not send the bytes from 0 to 8"):
        await ZmqRoute(cast(Requests, Offering())).fetch(manifest)
