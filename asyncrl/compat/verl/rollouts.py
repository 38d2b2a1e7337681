"""verl's interface of a rollout, which generates, and gives its memory back while the program trains new weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from asyncrl.compat.verl.batches.protocol import DataProto


class BaseRollout(ABC):
    """verl's base class. The arguments are kept as attributes, unchanged."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh

    @abstractmethod
    async def resume(self, tags: list[str]) -> None:
        """Take back the memory that `tags` name: `weights`, `kv_cache`, or both."""

    @abstractmethod
    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Serve these weights."""

    @abstractmethod
    async def release(self) -> None:
        """Give back the memory of weights and cache."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The batch of prompts with their responses. Raises NotImplementedError: the class has no such method."""
        raise NotImplementedError
