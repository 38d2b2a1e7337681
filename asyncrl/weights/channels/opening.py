"""The channels that the configuration names, for one engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import zmq.asyncio

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.network.keys import ClientKeys
from asyncrl.weights.channels.disk import DiskChannel
from asyncrl.weights.channels.distributed import DistributedChannel
from asyncrl.weights.channels.requests import Requests
from asyncrl.weights.channels.zmq import ZmqChannel
from asyncrl.weights.group import keep_to_loopback
from asyncrl.weights.receiver import Channel


def open_channels(config: TrainConfig, keys: ClientKeys | None) -> list[Channel]:
    """`weights.channel`, and after it `weights.fallback`."""
    weights, run = config.weights, locations.run_identity(config.run)
    keep_to_loopback(config, actor=True)

    def requests() -> Requests:
        endpoint, context = locations.weights_endpoint(config.network), zmq.asyncio.Context.instance()
        return Requests(endpoint, context, timeout_s=weights.timeout_s, keys=keys, run=run)

    ways: dict[str, Callable[[], Channel]] = {
        "zmq": lambda: ZmqChannel(requests(), deltas=weights.history > 0),
        "disk": lambda: DiskChannel(weights_dir(config), run, read=config.engine.kind == "embedded"),
        "distributed": lambda: DistributedChannel(requests(), _device(config), weights.timeout_s),
    }
    return [ways[name]() for name in (weights.channel, weights.fallback) if name != "none"]


def weights_dir(config: TrainConfig) -> Path:
    """Where the disk channel has its folders."""
    return Path(config.weights.dir) if config.weights.dir else locations.run_dir(config.run) / "pushed"


def _device(config: TrainConfig) -> torch.device:
    """Where weights are received: where an embedded engine uses them, or in host memory for servers."""
    if config.engine.kind == "embedded" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
