"""The weights of the embedded engine's model: replaced by published ones, all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.errors import WeightsError
from asyncrl.modelling.weight_format import WeightFormat, model_tensors

INT8_MAX = 127
_STACKED_NDIM = 3
"""Of the experts of a layer in one tensor."""


class OwnWeights:
    """Replaces all weights of a model or none: all steps that may fail or take long come before the first change.

    They are the parameters and persistent buffers of a Hugging Face `model`, given in the format of `WeightFormat`.
    With `int8` the matrices of its layers are rounded, those that it has now and those of updates: see `as_int8`.
    Embeddings, the output layer and routers are not, as in most quantized servers.

    Raises ConfigError: transformers cannot convert them.
    """

    def __init__(self, model: Any, int8: bool = False) -> None:
        self._tensors = model_tensors(model)
        self._rounded = _matrices(model) & self._tensors.keys() if int8 else set()
        for name in self._rounded:
            self._tensors[name].data = as_int8(self._tensors[name].data)
        self._format = WeightFormat(model)
        self._format.check_restores()
        self.shapes = self._format.shapes

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Published `tensors` in the model's own format, on its device and in its dtypes.

        Tensors that need no conversion or rounding are not copied.

        Raises WeightsError: one is missing, unknown, of another shape, or floating-point where the model's is not.
        """
        if wrong := sorted(self.shapes.keys() ^ tensors.keys()):
            raise WeightsError(f"{len(wrong)} tensors are missing or unknown, the first is {wrong[0]}; send each once")
        for name, shape in self.shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise WeightsError(
                    f"{name} came as {tensors[name].dtype} {tuple(tensors[name].shape)}; the model has {shape}"
                )
        own = self._format.restore(tensors)
        for name, tensor in self._tensors.items():
            if own[name].is_floating_point() != tensor.is_floating_point():
                raise WeightsError(f"{name} came as {own[name].dtype}; the model has {tensor.dtype}")
        staged = {name: own[name].to(tensor).contiguous() for name, tensor in self._tensors.items()}
        return staged | {name: as_int8(staged[name]) for name in self._rounded}

    def load(self, staged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace the model's own tensors by `staged`, without a copy. Returns those that were replaced."""
        replaced = {name: self._tensors[name].data for name in staged}
        for name, tensor in staged.items():
            self._tensors[name].data = tensor
        return replaced


def as_int8(matrix: torch.Tensor) -> torch.Tensor:
    """The `matrix` [..., width] in its own dtype, with each row rounded to what int8 and one scale a row can say: whole
    multiples, from -127 to 127, of a 127th of its largest magnitude."""
    rows = matrix.float()
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    return ((rows / scale).round() * scale).to(matrix.dtype)


def _matrices(model: Any) -> set[str]:
    """The names of the weights of linear layers but the output layer, and of stacked experts."""
    outputs = model.get_output_embeddings()
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not outputs
    }
    return linear | {name for name, parameter in model.named_parameters() if parameter.ndim == _STACKED_NDIM}
