"""An engine that only holds weights, the tensors that the tests send, and both ends of the ZeroMQ route."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import torch
import zmq
import zmq.asyncio

from asyncrl.errors import WeightsError
from asyncrl.types import RunIdentity
from asyncrl.weights.canary import CanaryCheck
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.receiver import OpenRoute, Receiver
from asyncrl.weights.requests import Requests
from asyncrl.weights.server import WeightServer
from asyncrl.weights.zmq_route import ZmqRoute


class HoldingEngine:
    """Takes weights as the protocol of engines says, and remembers every version that it served."""

    def __init__(self, version: int = -1) -> None:
        self.version = version
        self.tensors: dict[str, torch.Tensor] = {}
        self.served: list[int] = []
        self.checks: list[CanaryCheck | None] = []

    async def update_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor], check: CanaryCheck | None = None
    ) -> None:
        if version <= self.version:
            raise WeightsError(f"version {version} is not newer than {self.version}")
        self.version, self.tensors = version, dict(tensors)
        self.served.append(version)
        self.checks.append(check)


class Killed(BaseException):
    """Ends a write as a signal does: nothing is tidied up."""


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind that could go wrong: half precision, odd sizes, no dimension, no element, not contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embed": normal(37, 16).to(torch.bfloat16),
        "layer.weight": normal(13, 7),
        "layer.transposed": normal(5, 9).T,
        "layer.bias": normal(3).to(torch.float16),
        "scale": normal(),
        "empty": normal(0, 4),
        "ids": torch.arange(11),
        "flags": torch.tensor([True, False, True]),
    }


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tensor.dtype, tuple(tensor.shape), raw

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


@contextlib.contextmanager
def publisher(context: zmq.Context, port: int = 0, **options: Any) -> Iterator[WeightServer]:
    source = WeightServer("127.0.0.1", port, context, **{"chunk_bytes": 64, **options})
    try:
        yield source
    finally:
        source.close()


@contextlib.asynccontextmanager
async def route(
    endpoint: str,
    timeout_s: float = 10.0,
    run: RunIdentity | None = None,
    kind: type[ZmqRoute] = ZmqRoute,
    **options: Any,
) -> AsyncIterator[ZmqRoute]:
    context = zmq.asyncio.Context()
    link = kind(Requests(endpoint, context, timeout_s=timeout_s, run=run), **options)
    try:
        yield link
    finally:
        link.reset()
        context.destroy(linger=0)


async def newer(route: OpenRoute, version: int) -> Manifest:
    """The first manifest that is newer than `version`. The route alone gives up after a second, in which a busy
    machine may prepare no version."""
    while (manifest := await route.newer_than(version)) is None:
        pass
    return manifest


@contextlib.asynccontextmanager
async def following(
    route: OpenRoute, engine: HoldingEngine, expected: Mapping[str, tuple[int, ...]]
) -> AsyncIterator[Receiver]:
    """A receiver at work in the background."""
    receiver = Receiver([route], expected, retry_s=0.02)
    task = asyncio.create_task(receiver.run(engine))
    try:
        yield receiver
        assert not task.done(), "a receiver never ends by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
