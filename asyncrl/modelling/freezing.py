"""Freezes parameters of a model, chosen by rules (such as `moe_router`) and by patterns of names.

A frozen parameter gets no gradient and needs no optimizer state. Names are those of the Hugging Face model in memory
(`named_parameters`), where transformers stacks the experts of a layer. Tied parameters are one parameter: a rule or
pattern that matches one of their names freezes them all.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from asyncrl.errors import ConfigError

logger = logging.getLogger(__name__)

TOWERS = frozenset({"visual", "vision_tower", "vision_model", "vision_encoder", "image_encoder"})
"""The names that different families of models give to the module that encodes images."""

_VERL_PARTS = (".router.", ".experts.", "experts.", "shared_expert", "moe")


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """The frozen parameters of one module, together with those of the same module in other layers.

    - `module`: the module's name, with `*` in place of a layer's index
    - `tensors`: the number of frozen parameters
    - `count`: the number of their elements
    """

    module: str
    tensors: int
    count: int


def freeze(model: nn.Module, wanted: Sequence[str], key: str, may_be_all: bool = False) -> list[FrozenPart]:
    """Freeze parameters of a Hugging Face `model` that is not sharded yet; log and return them.

    `wanted` has the rules and patterns. It is the value of the option `key`.

    Raises ConfigError: see `frozen_names`.
    """
    if not wanted:
        return []
    own, names = dict(model.named_parameters()), frozen_names(model, wanted, key, may_be_all)
    for name in names:
        own[name].requires_grad_(False)
    parts = _by_module({name: own[name] for name in names})
    count, total = sum(each.count for each in parts), sum(each.numel() for each in own.values())
    lines = "".join(f"\n  {each.module}: {each.count:,} in {each.tensors} tensors" for each in parts)
    logger.info("%s=%s freezes %s of %s parameters:%s", key, list(wanted), f"{count:,}", f"{total:,}", lines)
    return parts


def frozen_names(model: nn.Module, wanted: Sequence[str], key: str, may_be_all: bool = False) -> list[str]:
    """The names of the parameters that `wanted` freezes, in the model's order. Tied parameters have their first
    name.

    Raises ConfigError: one of `wanted` freezes nothing, or together they freeze all parameters and `may_be_all` is
    false.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {name: first[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
    frozen: set[str] = set()
    for each in wanted:
        found = {own[name] for name in _names(model, each, own)}
        if not found:
            raise ConfigError(f"{key}={each}: {_nothing(model, each)}")
        frozen |= found
    if len(frozen) == len(first) and not may_be_all:
        raise ConfigError(f"{key}={list(wanted)}: this freezes all parameters of the model, and leaves none to train")
    return [name for name in first.values() if name in frozen]


def _names(model: nn.Module, each: str, own: Mapping[str, str]) -> Iterator[str]:
    rule = RULES.get(each)
    return rule(model) if rule is not None else (name for name in own if fnmatchcase(name, each))


def _nothing(model: nn.Module, each: str) -> str:
    kind = "rule" if each in RULES else "pattern"
    near = [] if each in RULES else get_close_matches(each, RULES, n=1)
    if near:
        return f"no parameter has this name; is the rule {near[0]} meant?"
    modules = ", ".join(part.module for part in _by_module(dict(model.named_parameters()))[:12])
    return f"this {kind} freezes nothing in a {type(model).__name__}, which has parameters in {modules}"


def _verl_moe(model: nn.Module) -> Iterator[str]:
    """The parameters that `moe_freeze_all` of verl's fork freezes. verl's option misses routers named `gate`, and the
    `gate_proj` of experts that are not stacked."""
    for name, _ in _all(model):
        taken = any(part in name for part in _VERL_PARTS) or name.endswith(".router.weight")
        if taken and "gate_proj" not in name:
            yield name


def _moe_all(model: nn.Module) -> Iterator[str]:
    """The parameters of all modules with a submodule `experts`."""
    blocks = [name for name, module in model.named_modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    for name, _ in _all(model):
        if any(name.startswith(f"{block}.") for block in blocks):
            yield name


def _moe_experts(model: nn.Module) -> Iterator[str]:
    return (name for name in _moe_all(model) if _is_expert(name))


def _moe_router(model: nn.Module) -> Iterator[str]:
    """The parameters of modules with experts, without the parameters of the experts themselves: routers, and the gates
    of shared experts."""
    return (name for name in _moe_all(model) if not _is_expert(name))


def _is_expert(name: str) -> bool:
    return not {"experts", "shared_expert", "shared_experts", "shared_mlp"}.isdisjoint(name.split("."))


def _vision(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in _all(model) if in_tower(name))


def in_tower(name: str) -> bool:
    """True if this is the name of a parameter or module of an image encoder."""
    return not TOWERS.isdisjoint(name.split("."))


def _embeddings(model: Any) -> Iterator[str]:
    """The input embeddings. A language model head that is tied to them is the same parameter, and is frozen, too."""
    own = {id(each) for each in model.get_input_embeddings().parameters()}
    return (name for name, each in _all(model) if id(each) in own)


def _all(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


RULES: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "verl_moe": _verl_moe,
    "moe_experts": _moe_experts,
    "moe_router": _moe_router,
    "moe_all": _moe_all,
    "vision": _vision,
    "embeddings": _embeddings,
}
"""The rules. Each yields names of parameters to freeze."""


def _by_module(parameters: Mapping[str, nn.Parameter]) -> list[FrozenPart]:
    """The parameters, grouped by module. The module of the same name in all layers is one group."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, parameter in parameters.items():
        sizes[re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0])].append(parameter.numel())
    return [FrozenPart(module, len(each), sum(each)) for module, each in sizes.items()]
