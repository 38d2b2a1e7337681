"""Opens the source of batches that the configuration names, and makes the settings of kept episodes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import zmq

from asyncrl.config import locations
from asyncrl.config.schema import ObserveConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.batches import RecordedReplay
from asyncrl.learner.batch.settings import KeepSettings
from asyncrl.machine import process
from asyncrl.network.keys import client_keys
from asyncrl.observe.spans import Spans
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.client.shards import ShardedReplay


def open_batches(
    config: TrainConfig, rank: int, context: zmq.Context[Any], stop: threading.Event, spans: Spans | None = None
) -> RecordedReplay | ShardedReplay:
    """Open the source of batches that `config` names, for one rank. `spans` records the offset of the replay's clock.
    Raises ConfigError and StoreError: `replay.source` cannot be used."""
    if config.replay.source is not None:
        source = Path(config.replay.source)
        if source.resolve().is_relative_to(locations.run_dir(config.run).resolve()):
            raise ConfigError(f"replay.source={source} is this run's own store; give the new training another run.name")
        return RecordedReplay(source, config.learner.total_steps)
    worker, incarnation = process.worker_name(f"learner-{rank}"), process.incarnation()
    endpoints = locations.replay_endpoints(config.network, config.replay.shards)
    keys, run = client_keys(config.network.keys), locations.run_identity(config.run, make=True)
    return ShardedReplay(
        [
            ReplayClient(each, worker, incarnation, stop, context=context, keys=keys, run=run, spans=spans)
            for each in endpoints
        ]
    )


def keep_settings(observe: ObserveConfig, seed: int) -> KeepSettings:
    """Return the settings of the episodes that a run keeps for people to read."""
    return KeepSettings(
        groups=observe.keep_episodes,
        evaluated=observe.keep_evaluated,
        max_bytes=observe.keep_episodes_mb << 20,
        seed=seed,
        uploads="episodes" in observe.upload,
    )
