"""The weights of the embedded engine's model: replaced by published ones, all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.errors import WeightsError
from asyncrl.modelling.weight_format import WeightFormat, model_tensors


class OwnWeights:
    """Replaces all weights of a model or none: all steps that may fail or take long come before the first change.

    They are the parameters and persistent buffers of a Hugging Face `model`, given in the format of `WeightFormat`.

    Raises ConfigError: transformers cannot convert them.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = model_tensors(model)
        self._format = WeightFormat(model)
        self._format.check_restores()
        self.shapes = self._format.shapes

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Published `tensors` in the model's own format, on its device and in its dtypes.

        Tensors that need no conversion are not copied.

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
        return {name: own[name].to(tensor).contiguous() for name, tensor in self._tensors.items()}

    def load(self, staged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace the model's own tensors by `staged`, without a copy. Returns those that were replaced."""
        replaced = {name: self._tensors[name].data for name in staged}
        for name, tensor in staged.items():
            self._tensors[name].data = tensor
        return replaced
