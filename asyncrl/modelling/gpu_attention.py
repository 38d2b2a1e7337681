"""Causal attention over packed sequences by the kernels for GPUs, in half precision, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from asyncrl.modelling.packed_layout import Run

WIDEST = 256
"""The widest head that the variable-length kernel takes."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""By query, key and value."""


def have_kernels(query: Tensor, value: Tensor) -> bool:
    """Whether these kernels take heads of [..., D] of this kind."""
    width = query.shape[-1]
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and width == value.shape[-1] and width <= WIDEST and width % 8 == 0


@dataclass(frozen=True, slots=True, eq=False)
class RunAttention:
    """Attention of one run: query [U, heads, D] over key and value [K, kv heads, D] of the whole pass, each token over
    at most the `window` latest ones. `ends` int32[2, count + 1] are the run's bounds on the device."""

    query: Tensor
    key: Tensor
    value: Tensor
    run: Run
    ends: Tensor
    scaling: float | None
    window: int | None

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output [queries, heads, D], and the logarithms float32[queries, heads] of its normalisers."""
        return self._cudnn() if self._takes_cudnn() else self._flash()

    def backward(self, of_output: Tensor, output: Tensor, normalisers: Tensor) -> Gradients:
        """The gradients by this run's query, key and value from that [U, heads, D] by the whole output. `output` [U,
        heads, D] and `normalisers` [U, heads] are what `forward` returned, of all runs."""
        backward = self._cudnn_backward if self._takes_cudnn() else self._flash_backward
        return backward(of_output, output, normalisers)

    def _takes_cudnn(self) -> bool:
        if self.run.width is None or (self.window is not None and self.run.deepest > self.window):
            return False
        return can_use_cudnn_attention(SDPAParams(*self._batches(), None, 0.0, True, True))

    def _batches(self) -> Gradients:
        return self._queries(self.query), self._keys(self.key), self._keys(self.value)

    def _keys(self, values: Tensor) -> Tensor:
        return self._from(values, self.run.keys.start)

    def _from(self, values: Tensor, start: int) -> Tensor:
        """[count, heads, width, D] of values [N, heads, D]: the sequences from the row `start` on, each with the tokens
        that follow it. A causal kernel shows those to none of its own."""
        assert self.run.width is not None
        wanted = self.run.count * self.run.width
        rows: Tensor = values[start : start + wanted]
        if len(rows) < wanted:
            rows = F.pad(rows, (0, 0, 0, 0, 0, wanted - len(rows)))
        sequences: Tensor = rows.unflatten(0, (self.run.count, -1))
        return sequences.transpose(1, 2)

    def _queries(self, values: Tensor, rest: float | None = None) -> Tensor:
        """The same of the queries, with `rest` beside them; None: anything."""
        run = self.run
        assert run.width is not None
        if rest is None and not run.ahead:
            return self._from(values, run.queries.start)
        rows, behind = values[run.queries], run.count * (run.width - run.deepest)
        if run.ahead or behind:
            rows = F.pad(rows, (0, 0, 0, 0, run.ahead, behind), value=rest or 0.0)
        sequences: Tensor = rows.unflatten(0, (run.count, -1))
        return sequences.transpose(1, 2)

    def _of_queries(self, batch: Tensor) -> Tensor:
        """[queries, heads, D] of [count, heads, width, D]."""
        count = self.run.queries.stop - self.run.queries.start
        return batch.transpose(1, 2).flatten(0, 1)[self.run.ahead : self.run.ahead + count]

    def _of_keys(self, batch: Tensor) -> Tensor:
        """[keys, heads, D] of [count, heads, width, D]."""
        return batch.transpose(1, 2).flatten(0, 1)[: self.run.keys.stop - self.run.keys.start]

    def _cudnn(self) -> tuple[Tensor, Tensor]:
        query, key, value = self._batches()
        output, normalisers, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=self.scaling
        )
        return self._of_queries(output), self._of_queries(normalisers.view(*query.shape[:3], 1))[..., 0]

    def _cudnn_backward(self, of_output: Tensor, output: Tensor, normalisers: Tensor) -> Gradients:
        # The tokens beside the queries get no gradient, and attend to nothing: exp(score - 1e30) is 0.
        logs = self._queries(normalisers[..., None], 1e30).contiguous()
        unused = torch.zeros((), dtype=torch.int64, device=of_output.device)
        width = self.run.width
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            self._queries(of_output, 0.0),
            *self._batches(),
            self._queries(output),
            logs,
            unused,
            unused,
            None,
            None,
            None,
            width,
            width,
            0.0,
            True,
            scale=self.scaling,
        )
        return self._of_queries(of_query), self._of_keys(of_key), self._of_keys(of_value)

    def _flash(self) -> tuple[Tensor, Tensor]:
        run = self.run
        # The kernel's mask is aligned at the last query and the last key.
        output, normalisers, *_ = torch.ops.aten._flash_attention_forward(
            self.query[run.queries],
            self.key[run.keys],
            self.value[run.keys],
            self.ends[0],
            self.ends[1],
            run.longest,
            run.deepest,
            0.0,
            self.window is None,
            False,
            scale=self.scaling,
            window_size_left=-1 if self.window is None else self.window - 1,
            window_size_right=0,
        )
        return output, normalisers.t()

    def _flash_backward(self, of_output: Tensor, output: Tensor, normalisers: Tensor) -> Gradients:
        run, device = self.run, of_output.device
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            of_output[run.queries],
            self.query[run.queries],
            self.key[run.keys],
            self.value[run.keys],
            output[run.queries],
            normalisers[run.queries].t().contiguous(),
            self.ends[0],
            self.ends[1],
            run.longest,
            run.deepest,
            0.0,
            self.window is None,
            torch.zeros(2, dtype=torch.uint64, device=device),
            torch.empty(0, device=device),
            scale=self.scaling,
            window_size_left=-1 if self.window is None else self.window - 1,
            window_size_right=0,
        )
        return of_query, of_key, of_value
