"""The algorithm, composed of the parts (loss, advantage, corrections and so on) that the configuration names. It is the
learner's only interface to this package.

`prepare` runs once per learner step, on the sequences of this rank. `loss` runs once per forward pass, on whole
sequences. `summary` runs once per step, on the sums of all passes and ranks.

The scalar that `loss` returns is divided by global counts, so its sum over micro-batches and ranks is the loss of the
global minibatch. The only `state` that changes from step to step is the coefficient of an adaptive KL.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.prime import Prime
from asyncrl.algorithms.batch import Episodes, Reduce, Tokens, Totals
from asyncrl.algorithms.composition import Composition
from asyncrl.algorithms.from_config import composition_of
from asyncrl.algorithms.losses.implicit import implicit_loss, implicit_summary
from asyncrl.algorithms.losses.value import value_loss
from asyncrl.algorithms.lr_scale import PREFIX
from asyncrl.algorithms.metrics import level_groups, summarise
from asyncrl.algorithms.old_tokens import only_trained
from asyncrl.algorithms.step_advantages import prepare
from asyncrl.algorithms.step_loss import importance, loss_of_pass
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.errors import ConfigError


class Algorithm:
    """The composed algorithm. Build it with `from_config`; `parts` are its parts."""

    def __init__(self, parts: Composition) -> None:
        self.parts = parts
        self.kl_weight = parts.kl.weight
        self._next_kl_weight = parts.kl.weight

    @classmethod
    def from_config(cls, config: AlgorithmConfig, updates: int = 1) -> Algorithm:
        """The algorithm for a learner that updates the policy `updates` times per step.

        Raises ConfigError: a name or parameter is wrong, or the parts cannot be combined.
        """
        return cls(composition_of(config, updates))

    @property
    def needs_proximal(self) -> bool:
        """True if the log-probs at the start of the step (`Tokens.proximal`) must be computed by an extra forward
        pass."""
        return self.parts.proximal == "recompute"

    @property
    def needs_reference(self) -> bool:
        """True if reference log-probs are needed (`Tokens.reference`)."""
        return self.parts.needs_reference

    @property
    def needs_critic(self) -> bool:
        """True if a critic is needed: it gives `Tokens.values`, and `value_loss` trains it."""
        return self.parts.advantage.needs_critic

    @property
    def needs_collisions(self) -> bool:
        """True if sums of squared probabilities at the start of the step are needed (`Tokens.collisions`)."""
        return self.parts.advantage.needs_collisions

    @property
    def needs_entropy(self) -> bool:
        """True if `loss` needs the entropy of every token."""
        return self.parts.entropy_weight != 0

    def state(self) -> dict[str, float]:
        """The state that a checkpoint must contain."""
        return {"kl_weight": self._next_kl_weight}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a `state()` of the same configuration."""
        self.kl_weight = self._next_kl_weight = state["kl_weight"]

    @torch.no_grad()
    def prepare(self, episodes: Episodes, tokens: Tokens, reduce: Reduce, trains_policy: bool = True) -> Tokens:
        """The tokens of this rank with their advantages, weights, rejections and all other values that are fixed for
        the step.

        `reduce` sums a float64 tensor elementwise over the learner's ranks. `trains_policy` is false if the step trains
        only the critic. Raises InvariantError: a tensor that the parts need is missing, or not finite on a policy
        token.
        """
        # The KL of a batch changes the coefficient only for the next batch.
        self.kl_weight = self._next_kl_weight
        tokens, adapted = prepare(self.parts, self.kl_weight, episodes, tokens, reduce)
        # While the policy does not move, its KL says nothing about the coefficient.
        self._next_kl_weight = adapted if trains_policy else self.kl_weight
        return tokens

    def loss(
        self, logprobs: Tensor, tokens: Tokens, totals: Totals, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of this micro-batch, a float64 scalar, and float64 sums for `summary`.

        The caller adds the losses and the sums of all micro-batches and ranks. logprobs float[N] and entropy float[N]
        have a gradient. The gradient of the loss is exactly 0 where `tokens.mask` is false, on tokens that are too old,
        and on every dropped token that no loss stream trains. `tokens` are whole sequences, as `prepare` returned them.
        Raises InvariantError: shapes differ, or a tensor is missing.
        """
        return loss_of_pass(self.parts, self.kl_weight, logprobs, tokens, totals, entropy)

    @torch.no_grad()
    def importance(self, logprobs: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The proximal log-probs float[N] and the importance weights float[N] that `loss` uses.

        A weight is 0 on tokens that are too old, and where `loss` drops the token. Log-probs and weights are 0 where
        `tokens.mask` is false.
        """
        return importance(self.parts, logprobs, tokens)

    @property
    def scales_lr(self) -> bool:
        """True if `lr_scale` may differ from 1."""
        return self.parts.lr_scale.name != "none"

    def lr_scale(self, sums: Mapping[str, Tensor]) -> float:
        """The factor of the policy's learning rate in an update, from `sums` over all of its micro-batches and ranks.
        Only the sums with the prefix PREFIX of lr_scale.py are read."""
        return self.parts.lr_scale({name: float(value) for name, value in sums.items() if name.startswith(PREFIX)})

    def value_loss(self, values: Tensor, tokens: Tokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """The critic's loss of this micro-batch, and sums for `summary`. `values` float[N] has a gradient."""
        return value_loss(values, only_trained(tokens), totals, self.parts.value, self.parts.value_aggregation)

    def implicit_loss(
        self, log_ratio: Tensor, outcome: Tensor, tokens: Tokens, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of an implicit process model on this micro-batch, and sums for `summary`.

        Such a model pi_phi gives each token the reward log(pi_phi / pi_ref), and learns only from outcomes. log_ratio
        float[N] is this log-ratio, with gradient; `outcome` is float[S]. Raises ConfigError: the advantage is not
        `prime`, the only part that reads such a model.
        """
        if not isinstance(self.parts.advantage, Prime):
            raise ConfigError("an implicit process model is trained for algorithm.advantage=prime only")
        return implicit_loss(log_ratio, outcome, tokens, totals, self.parts.advantage.beta)

    def summary(self, sums: Mapping[str, Tensor], episodes: Episodes | None = None) -> dict[str, float]:
        """The step's metrics, from `sums` over all micro-batches and ranks.

        Without the `episodes` of the batch, metrics that compare the members of a group are left out.
        """
        values = summarise(sums, self.parts.rule_names) | implicit_summary(sums, episodes)
        if self.parts.has_kl:
            values["kl_reference/weight"] = self.kl_weight
        if episodes is not None:
            values["groups/zero_variance"] = level_groups(self.parts.shaped(episodes), self.parts.compared)
        return values
