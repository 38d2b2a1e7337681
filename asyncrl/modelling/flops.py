"""The FLOPs that a model needs, and the FLOP/s of a device."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

FULL = "full_attention"
SLIDING = "sliding_attention"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that configurations give to the number of experts in a layer. `num_experts_per_tok` is how many of them a
token uses."""


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """The FLOPs of a forward pass without recomputation.

    - `per_token`: the FLOPs of all matrices for one token
    - `per_pair`: the FLOPs of attention for one pair of tokens, of which the first attends to the second. It maps each
      window (None: all earlier tokens) to the sum over the layers with this window.
    """

    per_token: float
    per_pair: Mapping[int | None, float]

    @staticmethod
    def of(module: nn.Module, config: Any) -> ForwardFlops:
        """Count the FLOPs of a module that contains the model of the Hugging Face `config`. The module may be sharded.

        Each weight of a matrix costs 2 FLOPs for each token. Only the experts that a token uses count. Embeddings cost
        nothing, but a language model head that shares their weights counts.
        """
        config = config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        keys, values = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
        layers = Counter(_windows(config))
        return ForwardFlops(
            2.0 * _weights(module, config),
            {window: 2.0 * count * heads * (keys + values) for window, count in layers.items()},
        )

    def __call__(self, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """The FLOPs float64[B] of B sequences with these `lengths`. Half of the pairs of tokens in a sequence or a
        window are masked, and do not count."""
        tokens = np.asarray(lengths, np.float64)
        flops = self.per_token * tokens
        for window, each in self.per_pair.items():
            seen = tokens if window is None else np.minimum(tokens, window)
            flops += each * seen * (tokens - seen / 2)
        return flops


def _weights(module: nn.Module, config: Any) -> float:
    """The number of matrix weights that a token uses."""
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
    share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    counted: dict[int, float] = {}
    for name, part in module.named_modules():
        routed = "experts" in name.split(".")
        for weight in () if isinstance(part, nn.Embedding) else part.parameters(recurse=False):
            if weight.dim() >= 2:
                counted[id(weight)] = weight.numel() * (share if routed else 1)
    return sum(counted.values())


def _windows(config: Any) -> list[int | None]:
    """The window of each layer with softmax attention."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * config.num_hidden_layers
    return [window if kind == SLIDING else None for kind in kinds if kind in (SLIDING, FULL)]


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of large products of random matrices. Returns the median. The device must be idle."""
    size, runs = (8192, 20) if device.type == "cuda" else (1024, 5)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(runs + 3):
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[3:])
