"""A model's parameters, replaced all or none: what can fail or takes long is done before the first one changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl.errors import WeightsError


class Parameters:
    """Those in `model.named_parameters()`: tied ones count once, under their first name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` on the model's device in its dtype; where they are so already, the same tensors.

        Raises WeightsError: one is missing, unknown, of another shape, or no floating-point tensor.
        """
        if wrong := sorted(self._parameters.keys() ^ tensors.keys()):
            raise WeightsError(f"{len(wrong)} tensors are missing or unknown, the first is {wrong[0]}; send each once")
        for name, parameter in self._parameters.items():
            if tensors[name].shape != parameter.shape or not tensors[name].is_floating_point():
                raise WeightsError(
                    f"{name} came as {tensors[name].dtype} {tuple(tensors[name].shape)}; "
                    f"the model has {parameter.dtype} {tuple(parameter.shape)}"
                )
        return {name: tensors[name].to(parameter).contiguous() for name, parameter in self._parameters.items()}

    def load(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Put what `stage` returned in the place of the model's own tensors, without a copy."""
        for name, tensor in staged.items():
            self._parameters[name].data = tensor
