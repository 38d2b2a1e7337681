"""Which channel weights take, and the channels of one engine.

| channel | how | what an engine holds beside its weights |
|---|---|---|
| zmq | each engine pulls versions or deltas from the learner | the last version, and the next one during a push |
| disk | the learner writes folders, engines or their servers read them | nothing for servers |
| distributed | the learner broadcasts to a group (gloo or NCCL) | the next version during a push |
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import zmq.asyncio

from asyncrl.config import locations
from asyncrl.config.bind import is_loopback
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.modelling.shapes import weight_files
from asyncrl.network.keys import ClientKeys
from asyncrl.weights.channels.disk import DiskChannel
from asyncrl.weights.channels.distributed import DistributedChannel
from asyncrl.weights.channels.requests import Requests
from asyncrl.weights.channels.zmq import ZmqChannel
from asyncrl.weights.group import keep_to_loopback
from asyncrl.weights.receiver import Channel
from asyncrl.weights.stored_tensors import StoredTensors

logger = logging.getLogger(__name__)


def choose_channel(config: TrainConfig, device: torch.device) -> tuple[str, str]:
    """The channel of `weights.channel`, and why. The learner and its engines make the same choice.

    `device` is where this process has weights: the learner's own device, or the engine's. `auto` takes the fastest
    channel on which no side hangs if it cannot reach the other.
    """
    weights, engine = config.weights, config.engine
    if weights.channel != "auto":
        return weights.channel, "the configuration names it"
    if not is_loopback(config.network.learner_address):
        return "zmq", "other machines may take part, and deltas are the fewest bytes"
    if engine.kind == "vllm" or (engine.kind == "sglang" and weights.into_servers == "disk"):
        return "disk", "the servers of this machine load folders"
    if engine.kind == "embedded" and device.type == "cuda":
        return "distributed", "NCCL copies from GPU to GPU of this machine"
    return "zmq", "it is the fastest into host memory"


def open_channels(config: TrainConfig, keys: ClientKeys | None) -> list[Channel]:
    """The channel of `weights.channel`, and zmq after any other: the learner always serves it."""
    weights, run, device = config.weights, locations.run_identity(config.run), _device(config)
    keep_to_loopback(config, actor=True)
    name, reason = choose_channel(config, device)
    logger.info("weights come by %s, because %s", name, reason)

    def requests() -> Requests:
        endpoint, context = locations.weights_endpoint(config.network), zmq.asyncio.Context.instance()
        return Requests(endpoint, context, timeout_s=weights.timeout_s, keys=keys, run=run)

    first: list[Channel] = []
    if name == "disk":
        first = [DiskChannel(weights_dir(config), run, read=config.engine.kind == "embedded")]
    elif name == "distributed":
        first = [DistributedChannel(requests(), device, weights.timeout_s)]
    return [*first, ZmqChannel(requests(), deltas=weights.history > 0, stored=_stored(config.model))]


def _stored(model: ModelConfig) -> StoredTensors | None:
    """The weight files that the run began with, if some of their tensors never change."""
    return StoredTensors(weight_files(model)) if model.freeze or model.lora.is_used else None


def weights_dir(config: TrainConfig) -> Path:
    """Where the disk channel has its folders."""
    return Path(config.weights.dir) if config.weights.dir else locations.run_dir(config.run) / "pushed"


def _device(config: TrainConfig) -> torch.device:
    """Where weights are received: where an embedded engine uses them; for servers in host memory, or with
    `weights.channel=distributed` on the last GPU, since the learner's are the first ones."""
    if config.engine.kind == "embedded" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if config.weights.channel == "distributed" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.device_count() - 1)
    return torch.device("cpu")
