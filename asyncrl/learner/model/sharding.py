"""Shards models over the ranks with FSDP2, and compiles their layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.model.activations import Activations, attention_width
from asyncrl.learner.model.expert_ranks import spread_experts
from asyncrl.learner.model.tensor_ranks import divide_layers
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.adapters import adapted_layers
from asyncrl.modelling.freezing import in_tower
from asyncrl.weights.manifest import DTYPES

UNIT_BYTES = 100e6
"""Ranks on GPUs gather at least this many bytes of layers at once. For fewer bytes, the host's work for the gathering
takes longer than the GPU's."""


SMALLEST_COMPILED = 3e8
"""Models with fewer parameters are compiled only with model.compile=true. In most runs, compiling them would take
longer than the faster layers save."""


def compiles(config: ModelConfig, device: torch.device, model: nn.Module) -> bool:
    """True if the layers of `model`, which is not sharded yet, and the computation after its logits are compiled."""
    # The choice depends on nothing that changes between the starts of a run: compiled layers round differently.
    if config.compile is not None:
        return config.compile
    return device.type == "cuda" and parameters_of(model) >= SMALLEST_COMPILED


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters of a model that is not sharded yet."""
    return sum(each.numel() for each in model.parameters())


@dataclass(frozen=True, slots=True)
class Frozen:
    """The settings of a model that is not trained. `on_host`: its weights stay in host memory."""

    on_host: bool = False


def shard(
    root: nn.Module,
    model: Any,
    config: ModelConfig,
    ranks: Ranks,
    frozen: Frozen | None = None,
    unit_bytes: float | None = None,
) -> Activations:
    """Shard `root`, which holds the Hugging Face `model`, in place: decoder layers in units, then the rest. Returns the
    object that decides which activations the layers keep.

    - A unit is a list of neighbouring layers that are gathered at once, of about `unit_bytes` in `config.dtype`. If
      `unit_bytes` is None, a unit has about UNIT_BYTES on a GPU, and a single layer on the CPU. Before a unit runs, it
      begins to gather the unit after it.
    - Master weights are float32. Gathered weights and the computation are in `config.dtype`. A frozen model, and the
      frozen part of a model with adapters, has only weights of this dtype.
    - The hooks of FSDP stay outside of a layer's compiled and recomputed part.
    """
    compiled = compiles(config, ranks.device, model)
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32)
    share = 1.0 if config.activations is None else config.activations
    activations = Activations(share, attention_width(model.config), _agreement(ranks))
    if frozen is not None:
        root.requires_grad_(False)
    # Parameters that `model.freeze` freezes are float32, like the trained ones.
    keeps_masters = frozen is None and not adapted_layers(root)
    convert(root, torch.float32 if keeps_masters else DTYPES[config.dtype])
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if frozen and frozen.on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": precision, "offload_policy": offload}
    names = set(model._no_split_modules or ())
    layers = {name: module for name, module in model.named_modules() if type(module).__name__ in names}
    towers = [layer for name, layer in layers.items() if in_tower(name)]
    named = {name: layer for name, layer in layers.items() if not in_tower(name)}
    decoding = list(named.values())
    if compiled:
        _allow_graphs()
    divided = divide_layers(model, decoding, ranks)
    options["ignored_params"] = spread_experts(model, ranks, DTYPES[config.dtype]) | divided
    # The vision tower's layers are not compiled: they split images by size, which a compiled graph cannot do. Their
    # rotary angles stay float32.
    for layer in towers:
        activations.wrap_tower(layer)
        fully_shard(layer, **options | {"mp_policy": replace(precision, cast_forward_inputs=False)})
    for layer in decoding:
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        activations.wrap(layer)
    if unit_bytes is None:
        unit_bytes = UNIT_BYTES if ranks.device.type == "cuda" else 0.0
    units = list(units_of(named, options["ignored_params"], unit_bytes / DTYPES[config.dtype].itemsize))
    for unit in units:
        fully_shard(unit, **options)
    for layer, following in pairwise([*towers, *(unit[0] for unit in units)]):
        layer.set_modules_to_forward_prefetch([following])
    fully_shard(root, **options, reshard_after_forward=True)
    return activations


def _agreement(ranks: Ranks) -> Callable[[float], float] | None:
    """Return a function that computes the largest value over the ranks that must recompute the same layers. These are
    the ranks that compute a pass together, or exchange tokens or slices. None: each rank decides alone."""
    divides_layers = ranks.context is not None and ranks.context.divides_layers
    if divides_layers or ranks.expert_mesh is not None:
        return ranks.largest
    return None if ranks.context is None else ranks.context.largest


def units_of(
    layers: Mapping[str, nn.Module], ignored: Collection[nn.Parameter], largest: float
) -> Iterator[list[nn.Module]]:
    """Yield lists of neighbouring layers. A list ends once its parameters, except `ignored` ones, have `largest`
    elements or more.
    """
    unit: list[nn.Module] = []
    size, before = 0, ""
    for name, layer in layers.items():
        parent = name.rpartition(".")[0]
        if unit and (size >= largest or parent != before):
            yield unit
            unit, size = [], 0
        unit.append(layer)
        size += sum(each.numel() for each in layer.parameters() if each not in ignored)
        before = parent
    if unit:
        yield unit


def _allow_graphs() -> None:
    """Let torch compile as many graphs as layers need."""
    from torch._dynamo import config as compiler
    from torch._inductor import config as kernels
    from torch.fx.experimental import _config as shapes

    # Each kind of layer of each model is compiled with and without gradients. Beyond torch's limit, 8 graphs for all
    # models together, layers would not be compiled.
    compiler.recompile_limit = max(compiler.recompile_limit, 64)
    # Otherwise torch makes the numbers of a layer, such as the epsilon of its norms, inputs of the graph. Attention
    # takes its scaling as a constant, so torch would begin the first graph once more, which takes seconds.
    compiler.specialize_float = True
    # With duck shapes, sizes that are equal by chance in a graph's first pass must be equal in all its passes. Some
    # sizes are equal in a pass over a single sequence.
    shapes.use_duck_shape = False
    # Without this option, torch fuses the kernels of norms only for many tokens, and each layer has up to four graphs,
    # for different numbers of tokens. Fused kernels are a little slower for few tokens. Torch 2.11 has the option,
    # other versions might not have it.
    if hasattr(kernels.triton, "mix_order_reduction_non_strict_mode"):
        kernels.triton.mix_order_reduction_non_strict_mode = True


def convert(root: nn.Module, frozen: torch.dtype) -> None:
    """Convert weights that are not trained to the dtype `frozen`. All other weights, and buffers such as rotary
    frequencies, become float32."""
    root.float()
    for parameter in root.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen)
