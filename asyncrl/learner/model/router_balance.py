"""Counts how much a mixture of experts uses each expert, and keeps the experts equally busy, by a loss or by biases.

Tokens are counted by sequence: a prefix that several sequences share counts once for each sequence, and padding does
not count. The counts are sums over passes and ranks, divided at the end.

The loss follows the Switch Transformer (Fedus et al., 2021), with several experts for each token, as the package
transformers computes it. In a layer of E experts the loss is E sum_e f_e P_e. Here f_e is the share of the minibatch's
tokens that go to expert e, and P_e is the mean probability of expert e over these tokens. The loss is the mean over the
layers.

The f_e are constants, which additional passes compute before the passes that train. The rest is a sum over tokens, so
any split into passes and ranks gives the same gradient. A layer adds this gradient to the gradient of its router in its
own backward pass, so the layer may be recomputed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.modelling.routers import ROUTERS, Routed, extend, family_of, routers_of

SEEN, TOKENS = "experts/seen", "experts/tokens"
"""The names of two sums over passes. The first sum is float64[layers, 2 experts + 1]: each layer has the tokens and the
probabilities of every expert, and the entropy. The second sum is the number of tokens."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The settings by which experts are balanced. `weight` is the weight of the loss. Each update changes the bias of
    an expert by `bias_rate`: down if the expert got more tokens than the mean of its layer, and up if it got fewer
    (DeepSeek-V3, 2024)."""

    weight: float = 0.0
    bias_rate: float = 0.0

    @staticmethod
    def from_config(config: AlgorithmConfig, model: Any) -> Balance:
        """Read from `config` how the experts of a Hugging Face `model` are balanced. Raises ConfigError: its routers
        cannot be balanced in this way."""
        weight = config.balance_weight
        if weight is None:
            found = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
            if found is None:
                raise ConfigError(
                    "algorithm.balance_weight=null: the model's configuration has no router_aux_loss_coef; set a number"
                )
            weight = float(found)
        family, routers = model.config.get_text_config().model_type, routers_of(model)
        if weight and not routers:
            raise ConfigError(
                f"algorithm.balance_weight={weight}: experts of a {family} model cannot be balanced; those of these "
                f"families can: {', '.join(sorted(ROUTERS))}"
            )
        if config.balance_bias_rate and not (routers and all(_bias(router) is not None for router in routers)):
            raise ConfigError(
                f"algorithm.balance_bias_rate={config.balance_bias_rate}: routers of a {family} model have no bias "
                "that balances experts, unlike those of deepseek_v3 and glm4_moe; use algorithm.balance_weight"
            )
        if config.balance_bias_rate and any(_is_frozen(router) for router in routers):
            raise ConfigError(
                f"algorithm.balance_bias_rate={config.balance_bias_rate} would move the biases of routers, which "
                "model.freeze freezes; set it to 0, or do not freeze the routers"
            )
        return Balance(weight, config.balance_bias_rate)


class RouterLoads:
    """The loads (tokens and probabilities) of the experts of a Hugging Face `model` in a pass."""

    def __init__(self, model: nn.Module) -> None:
        self._watched: list[Any] = list(routers_of(model))
        for each in self._watched:
            each.uses = each.seen = each.push = None
            each.probabilities = ROUTERS[family_of(each)].probabilities
        extend(self._watched, _Watched)
        self._packed: PackedSequences | None = None

    def __bool__(self) -> bool:
        return bool(self._watched)

    def begin(self, packed: PackedSequences) -> None:
        """Begin the pass `packed`."""
        self._packed = packed
        for each in self._watched:
            each.uses = packed.computed_uses

    def sums(self) -> dict[str, Tensor]:
        """Return the sums of the last pass. Without routers there are none. If ranks divide the tokens, each rank gets
        the sums over all ranks."""
        if not self._watched or self._packed is None:
            return {}
        seen = torch.stack([each.seen for each in self._watched if each.seen is not None]).double()
        if self._packed.part is not None:
            seen = self._packed.part.group.sum(seen)
        return {SEEN: seen, TOKENS: self._packed.uses.sum().double()}

    def push(self, sums: Mapping[str, Tensor] | None, weight: float = 0.0) -> None:
        """Make later backward passes add the gradient of the balance loss times `weight`. `sums` are over all passes
        and ranks of the minibatch. If `sums` is None, later passes add nothing."""
        if sums is None:
            for each in self._watched:
                each.push = None
            return
        seen, tokens = sums[SEEN], sums[TOKENS].clamp(min=1)
        experts = seen.shape[1] // 2
        slopes = weight / len(self._watched) * experts * seen[:, :experts] / tokens**2
        for each, slope in zip(self._watched, slopes.float().unbind(), strict=True):
            each.push = slope

    @torch.no_grad()
    def move_biases(self, sums: Mapping[str, Tensor], rate: float) -> None:
        """Raise by `rate` the bias of each expert that got fewer tokens than the mean of its layer, and lower the bias
        of each expert that got more."""
        for each, seen in zip(self._watched, sums[SEEN], strict=True):
            counts, bias = seen[: len(seen) // 2], _bias(each)
            assert bias is not None
            bias.add_((rate * (counts.mean() - counts).sign()).to(bias))


def load_summary(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of the routers from the sums of all ranks. A model without experts has none."""
    if SEEN not in sums or not float(sums[TOKENS]):
        return {}
    seen, tokens = sums[SEEN], float(sums[TOKENS])
    experts = seen.shape[1] // 2
    counts, probabilities, entropy = seen[:, :experts], seen[:, experts:-1], seen[:, -1]
    imbalance = counts.amax(1) / counts.mean(1)
    loss = experts * (counts / tokens * probabilities / tokens).sum(1)
    return {
        "experts/imbalance": float(imbalance.mean()),
        "experts/imbalance_max": float(imbalance.max()),
        "experts/dead": float((counts == 0).double().mean()),
        "experts/entropy": float(entropy.mean()) / tokens,
        "experts/balance_loss": float(loss.mean()),
    }


class _Watched:
    """A router that counts its last pass in `seen` float32[2 experts + 1]. A recomputed layer gives the same counts.
    `push` float32[experts] is the gradient of the balance loss with respect to a token's probabilities."""

    uses: Tensor | None
    seen: Tensor | None
    push: Tensor | None
    probabilities: Callable[[Tensor], Tensor]

    def forward(self, *states: Tensor) -> Routed:
        logits, weights, experts = super().forward(*states)  # type: ignore[misc]
        if self.uses is None:
            return logits, weights, experts
        found, uses = self.probabilities(logits), self.uses[:, None]
        with torch.no_grad():
            chosen = torch.zeros_like(found).scatter(1, experts, 1.0)
            entropy = -(found * found.clamp(min=1e-30).log()).sum(-1, keepdim=True)
            self.seen = (torch.cat([chosen, found, entropy], 1) * uses).sum(0)
        if self.push is not None and torch.is_grad_enabled():
            term = (found * uses * self.push).sum()
            weights = _WithGradientOf.apply(weights, term)
        return logits, weights, experts


class _WithGradientOf(torch.autograd.Function):
    """Returns `values` unchanged. The backward pass also goes through the scalar `term`, whose gradient is 1."""

    @staticmethod
    def forward(_: Any, values: Tensor, term: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


def _is_frozen(router: nn.Module) -> bool:
    return not any(each.requires_grad for each in router.parameters())


def _bias(router: nn.Module) -> Tensor | None:
    bias: Tensor | None = getattr(router, "e_score_correction_bias", None)
    return bias
