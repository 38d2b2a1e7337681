"""LoRA adapters in a Hugging Face model: their tensors, and how they change the model's matrices.

peft replaces a linear layer by its own layer, which keeps the original as `base_layer`. The names here are the names
that the model has without adapters. peft is not imported: its layers are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ADAPTER = "default"
"""The name that peft gives to an adapter by default."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankUpdate:
    """The update of a matrix [out, in] by an adapter: scale * up [out, rank] @ down [rank, in]. Both factors may be
    sharded."""

    down: Tensor
    up: Tensor
    scale: float

    def added_to(self, rows: Tensor, is_shard: bool) -> Tensor:
        """Merge the adapter into a matrix, in float32. All ranks call this together, since `down` is gathered.

        `rows` is the whole matrix, or this rank's shard of the matrix. Such a shard has the same rows as the rank's
        shard of `up`.
        """
        up, down = self.up.detach(), whole_tensor(self.down.detach())
        up = up.to_local() if is_shard and isinstance(up, DTensor) else whole_tensor(up)
        return torch.addmm(rows.float(), up.float(), down.float(), alpha=self.scale)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and ADAPTER in getattr(module, "lora_A", ())
    }


def base_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """The parameters of a model except its adapters', by the names that the model without adapters gives them.

    Tied parameters appear once, under their first name, unless `remove_duplicate` is false.
    """
    own = {id(each) for each in adapter_parameters(model).values()}
    renamed = {f"{name}.base_layer": name for name in adapted_layers(model)}
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        module, _, leaf = name.rpartition(".")
        if id(parameter) not in own:
            found[f"{renamed[module]}.{leaf}" if module in renamed else name] = parameter
    return found


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the adapters, by names such as `layers.0.mlp.up_proj.lora_A.weight`.

    These are the names in peft's files, without peft's prefix.
    """
    return {
        f"{name}.{part}.weight": getattr(layer, part)[ADAPTER].weight
        for name, layer in adapted_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


def low_rank_updates(model: nn.Module) -> dict[str, LowRankUpdate]:
    """Maps the name of each matrix with an adapter to the adapter's update."""
    return {
        f"{name}.weight": LowRankUpdate(
            layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, float(layer.scaling[ADAPTER])
        )
        for name, layer in adapted_layers(model).items()
    }


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the context. Use this only under `torch.no_grad`."""
    layers = adapted_layers(model).values()
    # peft's own method is not used, because it also changes which parameters get gradients. FSDP expects that the same
    # parameters get gradients in every pass.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def unknown_tensors(model: nn.Module, given: Mapping[str, Tensor]) -> list[str]:
    """The sorted names of adapter tensors that only one of `model` and `given` has, or that differ in shape."""
    own = {name: tuple(each.shape) for name, each in adapter_parameters(model).items()}
    other = {name: tuple(each.shape) for name, each in given.items()}
    return sorted({name for name, _ in own.items() ^ other.items()})


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded. All ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
