"""The routers of mixtures of experts, in float32 for every dtype of the model.

A router ranks experts by differences that bfloat16 rounds away. In bfloat16 it would send tokens to other experts than
the same weights do in an engine. Routers of DeepSeek-V3 and GLM-4.5 compute in float32 in transformers already.

Here the others do: logits, softmax, choice and weights. The router's weights are rounded to the model's dtype before,
as engines get them; the product itself is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Routed = tuple[Tensor, Tensor, Tensor]
"""The output of a router for T tokens: logits [T, experts]; weights and numbers [T, top_k] of the chosen experts."""


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """The routers of a family.

    `probabilities` turns logits [T, experts] into a distribution over the experts. `routes` is the class with which
    they route in float32; None: they do so themselves.
    """

    probabilities: Callable[[Tensor], Tensor]
    routes: type | None


def family_of(module: nn.Module) -> str:
    """The family of a module if it is a router of transformers, else an empty text."""
    path = type(module).__module__.split(".")
    is_router = path[:2] == ["transformers", "models"] and type(module).__name__.lower().endswith("topkrouter")
    return path[2] if is_router else ""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers in `model`, in its order, whose family is one of `ROUTERS`."""
    return [module for module in model.modules() if family_of(module) in ROUTERS]


def route_in_float32(model: nn.Module) -> None:
    """Have the routers of a Hugging Face `model` compute in float32, if their family is one of `ROUTERS`."""
    routers = routers_of(model)
    for family in {family_of(each) for each in routers}:
        if (routes := ROUTERS[family].routes) is not None:
            extend((each for each in routers if family_of(each) == family), routes)


def extend(modules: Iterable[nn.Module], behaviour: type) -> None:
    """Give modules the methods of `behaviour`, whose `super()` are their own."""
    # All modules of a kind get one class with the old name: torch.compile makes one graph for layers of the same class,
    # but one for each layer if methods are replaced in the modules themselves.
    made: dict[type, type] = {}
    for module in modules:
        kind = type(module)
        if kind not in made:
            made[kind] = type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__})
        module.__class__ = made[kind]


def _softmax(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    """The scores of the experts divided by their sum, as in DeepSeek-V3's balance loss."""
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _logits(router: Any, states: Tensor) -> Tensor:
    bias = getattr(router, "bias", None)
    states = states.reshape(-1, states.shape[-1]).float()
    return F.linear(states, router.weight.float(), None if bias is None else bias.float())


class _SoftmaxThenChoose:
    """The weights are the probabilities of the chosen experts, divided by their sum if the model says so."""

    norm_topk_prob = True
    top_k: int

    def forward(self, states: Tensor) -> Routed:
        logits = _logits(self, states)
        weights, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts


class _ChooseThenSoftmax:
    """The weights are a softmax over the logits of the chosen experts alone."""

    top_k: int

    def forward(self, states: Tensor) -> Routed:
        logits = _logits(self, states)
        chosen, experts = logits.topk(self.top_k, dim=-1)
        return logits, chosen.softmax(-1), experts


ROUTERS: Mapping[str, RouterFamily] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "mixtral"), RouterFamily(_softmax, _SoftmaxThenChoose)),
    "gpt_oss": RouterFamily(_softmax, _ChooseThenSoftmax),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), RouterFamily(_sigmoid, None)),
}
"""The families, by the folder of transformers that has the class of the router."""
