"""A forward pass of fixed shape: it reads inputs from a static buffer, and writes tokens and log-probs into another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.engine.cache import SlotCache
from asyncrl.engine.graphed.attention import Attention, StaticLayout
from asyncrl.engine.graphed.inputs import PassInputs, PassShape
from asyncrl.engine.sampling import sample


@dataclass(frozen=True, slots=True, eq=False)
class StaticTensors:
    """The tensors on the device that all passes share.

    - `inputs` int64: the buffer of `PassInputs`
    - `latest` int64[slots]: the last token that was sampled for each slot
    - `logits` [rows, V]: the logits of each row
    - `results` int64[rows, 2]: the sampled token of each row, and its log-prob as the bits of a float64
    """

    inputs: Tensor
    latest: Tensor
    logits: Tensor
    results: Tensor

    @classmethod
    def of(
        cls, largest: PassShape, slots: int, vocabulary: int, dtype: torch.dtype, device: torch.device
    ) -> StaticTensors:
        """Make the tensors for passes up to the shape `largest`."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        logits = torch.zeros((largest.rows, vocabulary), dtype=dtype, device=device)
        return cls(zeros(largest.numbers), zeros(slots), logits, zeros(largest.rows, 2))


class StaticPass:
    """The pass of `model` with one shape. It reads the tensor `inputs`, and writes `results` [rows, 2].

    The model must attend by a layout: see `engine.cache.use_slot_attention`. `run` needs no answer of the device, so a
    CUDA graph can repeat it.
    """

    def __init__(
        self, model: Any, cache: SlotCache, tensors: StaticTensors, shape: PassShape, attention: Attention
    ) -> None:
        self.inputs = tensors.inputs[: shape.numbers]
        self.results = tensors.results[: shape.rows]
        self._model = model
        self._tensors = tensors
        self._parts = PassInputs.of_tensor(tensors.inputs, shape)
        self._layout = StaticLayout(cache, self._parts, attention)

    def run(self) -> None:
        """Compute the pass for the present inputs."""
        inputs, latest = self._parts, self._tensors.latest
        ids = torch.where(inputs.ids < 0, latest[inputs.slots], inputs.ids)
        logits = self._model(
            input_ids=ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.last,
            layout=self._layout,
        ).logits[0]
        tokens, logprobs = sample(logits, inputs.temperatures.float(), inputs.noise)
        latest[inputs.targets] = tokens
        self._tensors.logits[: len(logits)] = logits
        self.results[:] = torch.stack([tokens, logprobs.double().view(torch.int64)], 1)
