"""An engine that is ready, with what keeps it going."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.actor.engine.base import Engine


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """`expected` has names and shapes of the tensors of an update. Each of `keepers` must run as long as the engine is
    used; it returns only by cancellation, or raises what ends the actor."""

    engine: Engine
    expected: Mapping[str, tuple[int, ...]]
    keepers: Sequence[Callable[[], Awaitable[None]]] = ()
