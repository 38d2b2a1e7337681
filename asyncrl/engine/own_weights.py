"""The weights of the embedded engine's model. Published weights replace all of them or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from asyncrl.errors import WeightsError
from asyncrl.modelling.weight_format import WeightFormat, model_tensors

_STACKED_NDIM = 3
"""The number of dimensions of a tensor that has the weights of all experts of a layer."""


class OwnWeights:
    """Replaces all weights of a model or none: all steps that may fail or take long come before the first change.

    The weights are the parameters and persistent buffers of a Hugging Face `model`. Updates have the format of
    `WeightFormat`. With `largest_integer` the matrices of the layers are rounded at construction and with each update:
    see `as_integers`. As in most quantized servers, embeddings, the output layer and routers are not rounded.

    With `in_place` the tensors keep their memory, and updates are copied into it.

    Raises ConfigError: transformers cannot convert the weights.
    """

    def __init__(self, model: Any, largest_integer: int | None = None, in_place: bool = False) -> None:
        self._tensors = model_tensors(model)
        self._in_place = in_place
        # Memory into which `load` copies the tensors that it replaces. `stage` allocates the memory, since this takes
        # longer than the copy, and forward passes wait for `load`.
        self._spare: dict[str, torch.Tensor] = {}
        self._device: torch.device = model.device
        # All updates use one stream: torch keeps freed memory for the stream that asked for it. With a stream for each
        # update, a GPU had dozens of unused copies of the weights in the end.
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._largest_integer = largest_integer
        self._matrices = _matrices(model) & self._tensors.keys() if largest_integer else set()
        self.load(self._rounded({name: self._tensors[name].data for name in self._matrices}), keep=False)
        self._format = WeightFormat(model)
        self._format.check_restores()
        self.shapes = self._format.shapes

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert published `tensors` to the model's own format, device and dtypes.

        Tensors that need no conversion or rounding are not copied.

        Raises WeightsError: a tensor is missing, unknown or of another shape, or has integers where the model's has
        floating-point numbers, or the reverse.
        """
        if wrong := sorted(self.shapes.keys() ^ tensors.keys()):
            raise WeightsError(f"{len(wrong)} tensors are missing or unknown, the first is {wrong[0]}")
        for name, shape in self.shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise WeightsError(
                    f"{name} came as {tensors[name].dtype} {tuple(tensors[name].shape)}; the model has {shape}"
                )
        with self._apart():
            return self._staged(tensors)

    def _staged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The memory of the last update is still here if that update was staged and never loaded.
        self._spare = {}
        own = self._format.restore(tensors)
        for name, tensor in self._tensors.items():
            if own[name].is_floating_point() != tensor.is_floating_point():
                raise WeightsError(f"{name} came as {own[name].dtype}; the model has {tensor.dtype}")
        staged = {name: own[name].to(tensor).contiguous() for name, tensor in self._tensors.items()}
        if self._in_place:
            spare = {name: torch.empty_like(each) for name, each in staged.items()}
            # The first such call on a GPU also loads the kernel, which takes longer than the copy. So a first call is
            # made here, and not in `load`.
            torch._foreach_copy_(list(spare.values()), list(staged.values()))
            self._spare = spare
        return staged | self._rounded({name: staged[name] for name in self._matrices})

    def load(self, staged: Mapping[str, torch.Tensor], keep: bool = True) -> dict[str, torch.Tensor]:
        """Replace the model's own tensors by `staged`. The tensors are copied only with `in_place`. Returns the
        replaced tensors, or without `keep` no tensors."""
        replaced = {name: self._tensors[name].data for name in staged}
        if self._in_place and staged:
            spare, self._spare = self._spare, {}
            kept = {}
            if keep:
                kept = {name: spare[name] if name in spare else torch.empty_like(old) for name, old in replaced.items()}
                torch._foreach_copy_(list(kept.values()), list(replaced.values()))
            torch._foreach_copy_(list(replaced.values()), list(staged.values()))
            _wait(self._device)
            return kept
        for name, tensor in staged.items():
            self._tensors[name].data = tensor
        return replaced if keep else {}

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Give work on a GPU the stream of the updates, so that forward passes need not wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _rounded(self, matrices: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._largest_integer is None:
            return matrices
        return {name: as_integers(matrix, self._largest_integer) for name, matrix in matrices.items()}


def _wait(device: torch.device) -> None:
    """Wait for the work of a GPU, since other streams may use the memory next."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def as_integers(matrix: torch.Tensor, largest: int) -> torch.Tensor:
    """Round each row of `matrix` [..., width] to integer multiples of a scale, in the matrix's dtype.

    The row's scale is its largest magnitude divided by `largest`.
    """
    rows = matrix.float()
    scale = (rows.abs().amax(-1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return ((rows / scale).round() * scale).to(matrix.dtype)


def _matrices(model: Any) -> set[str]:
    """The names of the weights that linear layers and stacked experts have. The output layer is left out."""
    outputs = model.get_output_embeddings()
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not outputs
    }
    return linear | {name for name, parameter in model.named_parameters() if parameter.ndim == _STACKED_NDIM}
