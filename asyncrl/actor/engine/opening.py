"""The engine that the configuration names."""

from __future__ import annotations

from asyncrl.actor.engine.opened import OpenedEngine
from asyncrl.config.schema import TrainConfig


def open_engine(config: TrainConfig) -> OpenedEngine:
    """Open the engine of `engine.kind`; no other's modules are imported. Raises ConfigError."""
    if config.engine.kind == "embedded":
        return _embedded(config)
    from asyncrl.actor.engine.fleet.opening import open_fleet

    return open_fleet(config)


def _embedded(config: TrainConfig) -> OpenedEngine:
    from asyncrl.actor.engine.embedded import EmbeddedEngine

    model = config.model
    engine = EmbeddedEngine.load(
        model.path, config.engine, dtype=model.dtype, trust_remote_code=model.trust_remote_code, seed=config.run.seed
    )
    return OpenedEngine(engine, engine.expected)
