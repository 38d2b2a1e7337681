"""The routers of mixtures of experts, in float32 whatever the model computes in.

A router ranks experts by differences that bfloat16 rounds away, so that it would send tokens to other experts than the
same weights do elsewhere. Routers of DeepSeek-V3 and GLM-4.5 compute in float32 in transformers already. Here the
others do: logits, softmax, choice and weights. The router's weights are rounded to the model's dtype before, as engines
get them; the product itself is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Routed = tuple[Tensor, Tensor, Tensor]
"""What a router gives for T tokens: logits [T, experts]; weights and numbers [T, top_k] of the chosen experts."""


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """The routers of a family: `probabilities` makes a distribution over the experts of logits [T, experts], and
    `route` routes hidden states [T, D] in float32; None: the family's own forward does."""

    probabilities: Callable[[Tensor], Tensor]
    route: Callable[[Any, Tensor], Routed] | None


def routers_of(model: nn.Module) -> Iterator[tuple[nn.Module, RouterFamily]]:
    """The routers in `model`, in its order, whose family is one of `ROUTERS`."""
    for module in model.modules():
        path = type(module).__module__.split(".")
        is_router = path[:2] == ["transformers", "models"] and type(module).__name__.lower().endswith("topkrouter")
        if is_router and path[2] in ROUTERS:
            yield module, ROUTERS[path[2]]


def route_in_float32(model: nn.Module) -> None:
    """Have the routers of a Hugging Face `model` compute in float32, if their family is one of `ROUTERS`. Its layers
    are neither compiled nor wrapped yet."""
    for router, family in routers_of(model):
        if family.route is not None:
            router.forward = partial(family.route, router)


def _softmax(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    """Scores of their own for each expert, divided by their sum, as DeepSeek-V3's balance loss takes them."""
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _logits(router: Any, states: Tensor) -> Tensor:
    bias = getattr(router, "bias", None)
    states = states.reshape(-1, states.shape[-1]).float()
    return F.linear(states, router.weight.float(), None if bias is None else bias.float())


def _softmax_then_choose(router: Any, states: Tensor, normalises: bool | None = None) -> Routed:
    """The probabilities of the chosen experts, divided by their sum if the model says so."""
    logits = _logits(router, states)
    weights, experts = logits.softmax(-1).topk(router.top_k, dim=-1)
    if router.norm_topk_prob if normalises is None else normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


def _choose_then_softmax(router: Any, states: Tensor) -> Routed:
    """A softmax over the logits of the chosen experts alone."""
    logits = _logits(router, states)
    chosen, experts = logits.topk(router.top_k, dim=-1)
    return logits, chosen.softmax(-1), experts


ROUTERS: Mapping[str, RouterFamily] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), RouterFamily(_softmax, _softmax_then_choose)),
    "mixtral": RouterFamily(_softmax, partial(_softmax_then_choose, normalises=True)),
    "gpt_oss": RouterFamily(_softmax, _choose_then_softmax),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), RouterFamily(_sigmoid, None)),
}
"""By the folder of transformers that the router's class is in."""
