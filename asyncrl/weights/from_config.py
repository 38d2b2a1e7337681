"""Makes the settings of routes, and the engine's ends of its routes, from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import zmq.asyncio

from asyncrl.config import locations
from asyncrl.config.bind import is_loopback
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.modelling.shapes import weight_files
from asyncrl.network.keys import ClientKeys
from asyncrl.weights.disk_route import DiskRoute
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.nccl import keep_to_loopback
from asyncrl.weights.receiver import OpenRoute
from asyncrl.weights.requests import Requests
from asyncrl.weights.routes import RouteSettings, routes_to_engines
from asyncrl.weights.stored_tensors import StoredTensors
from asyncrl.weights.zmq_route import ZmqRoute

logger = logging.getLogger(__name__)


def route_settings(config: TrainConfig) -> RouteSettings:
    """Return the settings by which the learner and its engines choose routes."""
    weights = config.weights
    return RouteSettings(
        to_engines=weights.to_engines,
        into_servers=weights.into_servers,
        engine=config.engine.kind,
        on_loopback=is_loopback(config.network.learner_address),
        folder=Path(weights.dir) if weights.dir else locations.run_dir(config.run) / "pushed",
    )


def open_routes(config: TrainConfig, keys: ClientKeys | None) -> list[OpenRoute]:
    """Open the engine's ends of the routes that the engine tries, best first."""
    settings, weights, run = route_settings(config), config.weights, locations.run_identity(config.run)
    keep_to_loopback(settings, actor=True)
    device = _receiving_device(settings)
    chosen = routes_to_engines(settings, device)
    logger.info("weights come by %s, because %s", chosen.routes[0].name, chosen.why)

    def requests() -> Requests:
        endpoint, context = locations.weights_endpoint(config.network), zmq.asyncio.Context.instance()
        return Requests(endpoint, context, timeout_s=weights.timeout_s, keys=keys, run=run)

    ends: Mapping[str, Callable[[], OpenRoute]] = {
        "disk": lambda: DiskRoute(settings.folder, run, read=settings.engine == "embedded"),
        "distributed": lambda: DistributedRoute(requests(), device, weights.timeout_s),
        "zmq": lambda: ZmqRoute(requests(), deltas=weights.history > 0, stored=_stored(config.model)),
    }
    return [ends[route.name]() for route in chosen.routes]


def _stored(model: ModelConfig) -> StoredTensors | None:
    """Return a reader of the weight files with which the run began; None if all tensors change in training."""
    return StoredTensors(weight_files(model)) if model.freeze or model.lora.is_used else None


def _receiving_device(settings: RouteSettings) -> torch.device:
    """Return the device on which an actor receives weights. It is the GPU of an embedded engine, or the last GPU if the
    learner broadcasts to an actor with servers. In all other cases it is the CPU."""
    if settings.engine == "embedded" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if settings.to_engines == "distributed" and torch.cuda.is_available():
        # The learner has the first GPUs.
        return torch.device("cuda", torch.cuda.device_count() - 1)
    return torch.device("cpu")
