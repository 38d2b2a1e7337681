"""The engine that the configuration names, with what keeps it going."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config.schema import TrainConfig

if TYPE_CHECKING:
    from asyncrl.actor.engine.base import Engine


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """`expected` has names and shapes of the tensors of an update. Each of `keepers` must run as long as the engine is
    used; it returns only by cancellation, or raises what ends the actor."""

    engine: Engine
    expected: Mapping[str, tuple[int, ...]]
    keepers: Sequence[Callable[[], Awaitable[None]]] = ()


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
