"""Computes causal attention over packed sequences, and its gradients, by GPU kernels in half precision.

cuDNN computes all sequences of a pass, of any lengths, in one call. It is called through its own Python package, since
torch builds a new cuDNN graph for each such call. If cuDNN has no kernel, torch's variable-length kernel is used.

The speed was measured on an H200 for sequences of heavy-tailed lengths, with 16 heads of queries and 8 of keys, each of
width 128. With cuDNN it was 496 TFLOP/s in the forward pass and 403 TFLOP/s in the backward pass. With torch's kernel
it was 279 TFLOP/s forward and 244 TFLOP/s backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.modelling.cudnn_attention import Problem, find_kernel
from asyncrl.modelling.packed_layout import power_of_two
from asyncrl.modelling.plain_attention import Gradients

WIDEST = 256
"""The largest head width that the kernels support."""


def have_kernels(query: Tensor, value: Tensor) -> bool:
    """True if the kernels support the device, dtype and head width of these tensors [..., D]."""
    width = query.shape[-1]
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and width == value.shape[-1] and width <= WIDEST and width % 8 == 0


@dataclass(frozen=True, slots=True, eq=False)
class GpuAttention:
    """Attention of a pass: query [U, heads, D] over key and value [K, kv heads, D].

    Each token sees at most the `window` latest tokens. `bounds` and `ends` come from a `PackedLayout`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bounds: Tensor
    ends: Tensor
    scaling: float | None
    window: int | None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns the output [U, heads, D], and the logarithms float32[U, heads] of the softmax normalisers. Both are 0
        on padding."""
        kernel = find_kernel(self._problem(), backward=False)
        if kernel is None:
            return self._flash()
        given = self._given()
        output = torch.empty_like(given["query"])
        normalisers = output.new_empty(output.shape[:2], dtype=torch.float32)
        kernel.run(self.ends, {**given, "output": output, "normalisers": normalisers})
        return self._cleared(output, 0), self._cleared(normalisers, 0)

    def backward(self, of_output: Tensor, output: Tensor, normalisers: Tensor) -> Gradients:
        """The gradients with respect to query, key and value, given the gradient with respect to the output [U, heads,
        D]. They are 0 on padding.

        `output` and `normalisers` must be the result of `forward`.
        """
        # cuDNN's fast backward pass aligns the mask at the first query and the first key. So a sequence must have as
        # many queries as keys.
        kernel = find_kernel(self._problem(), backward=True) if torch.equal(*self.bounds) else None
        if kernel is None:
            return self._flash_backward(of_output, output, normalisers)
        given = self._given()
        of_query, of_key, of_value = (torch.empty_like(each) for each in given.values())
        others = {"of_output": of_output.contiguous(), "output": output, "normalisers": normalisers}
        gradients = {"of_query": of_query, "of_key": of_key, "of_value": of_value}
        kernel.run(self.ends, {**given, **others, **gradients})
        return self._cleared(of_query, 0), self._cleared(of_key, 1), self._cleared(of_value, 1)

    def _given(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).contiguous() for name in ("query", "key", "value")}

    def _problem(self) -> Problem:
        queries, keys = self.bounds
        window = None if self.window is None or self.window >= int(keys.diff().max()) else self.window
        return Problem(
            device=self.query.device.index,
            dtype=self.query.dtype,
            sequences=self.ends.shape[1] - 1,
            queries=power_of_two(int(queries.diff().max())),
            keys=power_of_two(int(keys.diff().max())),
            tokens=_rounded(max(len(self.query), len(self.key))),
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            width=self.query.shape[2],
            scaling=self.query.shape[2] ** -0.5 if self.scaling is None else self.scaling,
            window=window,
        )

    def _cleared(self, values: Tensor, side: int) -> Tensor:
        """Set the padding to zero, because the kernels do not write it."""
        values[int(self.bounds[side, -1]) :].zero_()
        return values

    def _longest(self) -> tuple[int, int]:
        queries, keys = self.bounds.diff().amax(1).tolist()
        return queries, keys

    def _flash(self) -> tuple[Tensor, Tensor]:
        queries, keys = self.bounds[:, -1].tolist()
        # torch's kernel aligns the mask at the last query and the last key, as is needed here.
        output, normalisers, *_ = torch.ops.aten._flash_attention_forward(
            self.query[:queries],
            self.key[:keys],
            self.value[:keys],
            self.ends[0],
            self.ends[1],
            *self._longest(),
            0.0,
            self.window is None,
            False,
            scale=self.scaling,
            window_size_left=-1 if self.window is None else self.window - 1,
            window_size_right=0,
        )
        return _padded(output, len(self.query)), _padded(normalisers.t(), len(self.query))

    def _flash_backward(self, of_output: Tensor, output: Tensor, normalisers: Tensor) -> Gradients:
        queries, keys = self.bounds[:, -1].tolist()
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            of_output[:queries],
            self.query[:queries],
            self.key[:keys],
            self.value[:keys],
            output[:queries],
            normalisers[:queries].t().contiguous(),
            self.ends[0],
            self.ends[1],
            *self._longest(),
            0.0,
            self.window is None,
            torch.zeros(2, dtype=torch.uint64, device=of_output.device),
            torch.empty(0, device=of_output.device),
            scale=self.scaling,
            window_size_left=-1 if self.window is None else self.window - 1,
            window_size_right=0,
        )
        return _padded(of_query, len(self.query)), _padded(of_key, len(self.key)), _padded(of_value, len(self.key))


def _rounded(tokens: int) -> int:
    """Round up to a multiple of an eighth of the next power of two. Then few different numbers occur, and few kernels
    are needed."""
    step = max(1, power_of_two(tokens) // 8)
    return -(-tokens // step) * step


def _padded(values: Tensor, rows: int) -> Tensor:
    """The values, padded with zeros to `rows` rows."""
    missing = rows - len(values)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values.contiguous()
