"""Makes the routers of mixtures of experts compute in float32, for every dtype of the model.

A router sends each token to a few experts of its layer. It ranks experts by small differences, which bfloat16 rounds
away. In bfloat16, learner and engine would send some tokens to different experts, although both have the same weights.

In transformers, routers of DeepSeek-V3 and GLM-4.5 already compute in float32. This file makes the routers of more
families compute logits, softmax, the choice of experts and their weights in float32. The router's own weights are first
rounded to the model's dtype, in which engines receive them. Their product with the hidden states is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Routed = tuple[Tensor, Tensor, Tensor]
"""The output of a router for T tokens: logits [T, experts], and weights and indices [T, top_k] of the chosen
experts."""


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """The routers of a family of models.

    - `probabilities` turns logits [T, experts] into a distribution over the experts.
    - `routes` is the class that makes the routers compute in float32. None: they already do so in transformers.
    """

    probabilities: Callable[[Tensor], Tensor]
    routes: type | None


def family_of(module: nn.Module) -> str:
    """The family of a router that transformers defines; "" for any other module."""
    path = type(module).__module__.split(".")
    is_router = path[:2] == ["transformers", "models"] and type(module).__name__.lower().endswith("topkrouter")
    return path[2] if is_router else ""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers in `model` whose family is in `ROUTERS`, in the model's order."""
    return [module for module in model.modules() if family_of(module) in ROUTERS]


def route_in_float32(model: nn.Module) -> None:
    """Make the routers of a Hugging Face `model` compute in float32, if their family is in `ROUTERS`."""
    routers = routers_of(model)
    for family in {family_of(each) for each in routers}:
        if (routes := ROUTERS[family].routes) is not None:
            extend((each for each in routers if family_of(each) == family), routes)


def extend(modules: Iterable[nn.Module], behaviour: type) -> None:
    """Give modules the methods of `behaviour`, which override the modules' methods and may call them by `super()`."""
    # All modules of a class get the same new class, with the old name. So torch.compile makes one graph for all layers.
    # If methods were replaced in each module, it would make a graph for each layer.
    made: dict[type, type] = {}
    for module in modules:
        kind = type(module)
        if kind not in made:
            made[kind] = type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__})
        module.__class__ = made[kind]


def _softmax(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    """The scores of the experts, divided by their sum. DeepSeek-V3's balance loss, which keeps the load of experts
    equal, uses the same distribution."""
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _logits(router: Any, states: Tensor) -> Tensor:
    bias = getattr(router, "bias", None)
    states = states.reshape(-1, states.shape[-1]).float()
    return F.linear(states, router.weight.float(), None if bias is None else bias.float())


class _SoftmaxThenChoose:
    """The weights are the probabilities of the chosen experts. With `norm_topk_prob` they are divided by their sum."""

    norm_topk_prob = True
    top_k: int

    def forward(self, states: Tensor) -> Routed:
        logits = _logits(self, states)
        weights, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts


class _ChooseThenSoftmax:
    """The weights are a softmax over the logits of only the chosen experts."""

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
"""Maps the folder in transformers/models that defines a router to the router's family."""
