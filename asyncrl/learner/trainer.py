"""The learner's math: forward passes, losses, gradients and updates of one rank's part of a batch.

Losses are divided by counts over the global minibatch, so the gradients of its parts can be added. The gradients
accumulate over the passes, and FSDP's mean over the ranks is turned back into a sum. The update is therefore the same,
except for rounding, however a batch is split into passes and over ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.algorithms.ratio_bins import CORRECTED, RAW
from asyncrl.learner.batch.local_batch import LocalBatch
from asyncrl.learner.batch.minibatch import ImitationBatch, Minibatch
from asyncrl.learner.batch.packing import ForwardPass, PackedSequences
from asyncrl.learner.batch.schedule import Passes
from asyncrl.learner.imitating import NLL, add_imitation_gradient, imitation_nll, imitation_summary
from asyncrl.learner.model.critic import Critic, critic_summary
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import BaseOfPolicy, Policy
from asyncrl.learner.model.router_balance import Balance, load_summary
from asyncrl.learner.model.routing_replay import REFUSED, replay_summary
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.settings import StepSettings
from asyncrl.learner.step_result import LOSS, StepResult, Sums, add_gradient, add_sums


@dataclass(eq=False)
class Trainer:
    """Trains `policy` with `algorithm`. Also trains the `critic` and the process model `implicit`, if there are any.

    A step calls `prepare`, which computes all that is fixed for the step, and then `learn`, which makes the updates.
    All ranks call the methods in the same order, with the same number of passes. Once `stop` is set on one rank, the
    next pass or update raises StoppedError on all.
    """

    ranks: Ranks
    algorithm: Algorithm
    policy: Trainable[Policy]
    critic: Trainable[Critic] | None
    reference: Policy | BaseOfPolicy | None
    stop: threading.Event
    implicit: Trainable[Policy] | None = None
    value_weight: float = 0.0
    """The weight of the critic's loss if the policy has the value head."""
    critic_alone: int = 0
    """The number of first learner steps that train the critic, and not the policy."""
    balance: Balance = field(default_factory=Balance)
    """The settings by which the policy's experts are kept equally busy, if it is a mixture of experts."""

    def configure(self, settings: StepSettings) -> None:
        """Use these settings from the next step on. The coefficient of an adaptive KL penalty starts again at its first
        value.

        Raises ConfigError: see `Algorithm.from_config` and `Balance.from_config`.
        """
        learner = settings.learner
        self.algorithm = Algorithm.from_config(settings.algorithm, learner.minibatches)
        self.balance = Balance.from_config(settings.algorithm, self.policy.module.model)
        self.policy.configure(learner.lr, learner)
        self.value_weight = settings.critic_weight
        if self.critic is not None:
            self.critic.configure(settings.critic_lr, learner)
            self.critic_alone = settings.critic_warmup_steps
        if self.implicit is not None:
            self.implicit.configure(settings.implicit_lr, learner)

    @property
    def models(self) -> dict[str, Trainable[Any]]:
        """Maps names to the models that are trained."""
        models = {"policy": self.policy, "critic": self.critic, "implicit": self.implicit}
        return {name: model for name, model in models.items() if model is not None}

    def trains_policy(self, step: int) -> bool:
        """True if a learner step trains the policy, and not only the critic."""
        return step >= self.critic_alone

    def prepare(
        self, batch: LocalBatch, episodes: Episodes, minibatches: Sequence[Minibatch], trains_policy: bool = True
    ) -> LocalBatch:
        """Return the batch with everything that is fixed for the step: log-probs, values, advantages. `trains_policy`
        is false in the critic's warm-up."""

        def of_all(forward: Callable[[PackedSequences], Tensor]) -> Tensor:
            return self.forward(forward, batch, minibatches)

        tokens, policy, reference, critic = batch.tokens, self.policy.module, self.reference, self.critic
        implicit = self.implicit
        if self.algorithm.needs_collisions:
            both = self.forward(lambda packed: _both(policy(packed, with_collisions=True)), batch, minibatches, (2,))
            tokens = replace(tokens, proximal=both[:, 0], collisions=both[:, 1])
        elif self.algorithm.needs_proximal:
            tokens = replace(tokens, proximal=of_all(lambda packed: policy(packed)[0]))
        if reference is not None:
            tokens = replace(tokens, reference=of_all(lambda packed: reference(packed.unrouted())[0]))
        if critic is not None:
            tokens = replace(tokens, values=of_all(critic.module))
        elif policy.value_head is not None:
            tokens = replace(tokens, values=of_all(policy.values))
        if implicit is not None:
            assert tokens.reference is not None
            tokens = replace(tokens, implicit=of_all(lambda packed: implicit.module(packed)[0]) - tokens.reference)
        prepared = self.algorithm.prepare(episodes, tokens, self.ranks.sum_pass_groups, trains_policy)
        return replace(batch, tokens=prepared)

    @torch.no_grad()
    def forward(
        self,
        forward: Callable[[PackedSequences], Tensor],
        batch: LocalBatch,
        minibatches: Sequence[Minibatch],
        each_token: tuple[int, ...] = (),
    ) -> Tensor:
        """Return the result of `forward` for the N tokens of all passes, float32[N, *each_token]."""
        behaviour = batch.tokens.behaviour
        result = behaviour.new_zeros(len(behaviour), *each_token)
        for minibatch in minibatches:
            for each in self._passes(batch, minibatch.passes):
                values = forward(each.packed)
                if len(each.rows):
                    result[each.rows] = values
        return result

    def _passes(self, batch: LocalBatch, passes: Passes) -> Iterator[ForwardPass]:
        for members in passes:
            self.ranks.stop_if(self.stop.is_set(), updating=False)
            this = batch.forward_pass(members)
            this = this.padded() if self.policy.module.pads_passes else this
            yield this.divided(self.ranks.context).to(self.ranks.device)

    def learn(
        self,
        step: int,
        batch: LocalBatch,
        episodes: Episodes,
        minibatches: Sequence[Minibatch],
        seen: Tensor | None = None,
        imitation: ImitationBatch | None = None,
    ) -> StepResult:
        """Make one update for each minibatch. An update also learns its part of the demonstrations of `imitation`.

        `seen` float32[N], if given, gets the log-probs that the policy computes in its passes. In the critic's warm-up
        the policy does not change, and there must be no `imitation`.
        """
        # The host waits for the GPU once an update, and in a pass only if the algorithm drops tokens.
        result, sums = StepResult(), Sums()
        trained = self.models
        is_warmup = not self.trains_policy(step)
        if is_warmup:
            del trained["policy"]
        if batch.refused:
            sums[REFUSED] = torch.tensor(batch.refused, dtype=torch.float64)
        for index, minibatch in enumerate(minibatches):
            imitates = imitation is not None and bool(imitation.passes[index])
            if not is_warmup:
                self._balance_by_loss(batch, minibatch.passes)
            loads, found = Sums(), Sums()
            for number, each in enumerate(self._passes(batch, minibatch.passes), 1):
                for model in trained.values():
                    follows = imitates and model is self.policy
                    model.begin_pass(is_last=number == len(minibatch.passes) and not follows)
                add_sums(found, self._backward(batch, episodes, each, minibatch.totals, seen, is_warmup))
                add_sums(loads, self.policy.module.loads.sums())
            if imitation is not None:
                # The balance loss of the experts covers only the tokens of episodes.
                self.policy.module.loads.push(None)
                self._imitate(imitation, index, sums)
            add_sums(sums, found)
            if self.algorithm.scales_lr and not is_warmup:
                result.lr_scales.append(self.algorithm.lr_scale(self.ranks.merge(found)))
            self._update(step, result, loads, trained)
            add_sums(sums, loads)
        total = self._summarise(result, sums, len(minibatches), imitation)
        if result.lr_scales:
            result.summary["lr_scale"] = sum(result.lr_scales) / len(result.lr_scales)
        if self.critic_alone:
            result.summary["value/warmup"] = float(is_warmup)
        result.ratios = {name: total[name].tolist() for name in (RAW, CORRECTED) if name in total}
        result.summary |= self.algorithm.summary(total, episodes) | critic_summary(total) | replay_summary(total)
        return result

    def _backward(
        self,
        batch: LocalBatch,
        episodes: Episodes,
        this: ForwardPass,
        totals: Totals,
        seen: Tensor | None,
        is_warmup: bool = False,
    ) -> Sums:
        """Add the gradients of one pass to all models' gradients, except the policy's during a warm-up of the critic.
        Returns the sums of the pass.
        """
        algorithm, packed, rows = self.algorithm, this.packed, this.rows
        tokens = replace(batch.tokens.select(rows), view=this.view, measured=this.measured)
        with torch.no_grad() if is_warmup else nullcontext():
            values = None
            if self.policy.module.value_head is None:
                logprobs, entropy = self.policy.module(packed, algorithm.needs_entropy, measures=True)
            else:
                logprobs, entropy, values = self.policy.module.with_values(packed, algorithm.needs_entropy, True)
        replayed = self.policy.module.replay_sums(packed) if len(rows) else {}
        if seen is not None and len(rows):
            seen[rows] = logprobs.detach().to(seen.dtype)

        def policy_loss() -> tuple[Tensor, Sums]:
            loss, sums = algorithm.loss(logprobs, tokens, totals, entropy)
            sums = {**sums, LOSS: loss}
            if values is not None:
                value_loss, more = algorithm.value_loss(values, tokens, totals)
                loss, sums = loss + self.value_weight * value_loss, sums | more
            return loss, sums

        if not is_warmup:
            outputs = logprobs if values is None else torch.cat([logprobs, values])
            sums = replayed | add_gradient(self.policy, outputs, rows, policy_loss)
        else:
            sums = replayed | (policy_loss()[1] if len(rows) else {})
        if self.critic is not None:
            own = self.critic.module(packed)
            sums |= add_gradient(self.critic, own, rows, lambda: algorithm.value_loss(own, tokens, totals))
        if self.implicit is not None:
            assert tokens.reference is not None
            implicit, reference, outcome = self.implicit.module(packed)[0], tokens.reference, episodes.outcome
            sums |= add_gradient(
                self.implicit,
                implicit,
                rows,
                lambda: algorithm.implicit_loss(implicit - reference, outcome, tokens, totals),
            )
        return sums

    def _balance_by_loss(self, batch: LocalBatch, passes: Passes) -> None:
        """Make the passes of a minibatch add the gradient of the balance loss, unless its weight is 0. This loss keeps
        the experts equally busy."""
        loads, sums = self.policy.module.loads, Sums()
        loads.push(None)
        if self.balance.weight:
            # The loss contains the share of the tokens that each expert gets. These additional passes compute the
            # shares before the passes that train.
            with torch.no_grad():
                for each in self._passes(batch, passes):
                    self.policy.module(each.packed)
                    add_sums(sums, loads.sums())
            loads.push(self._over_ranks(sums), self.balance.weight * self.policy.loss_factor)

    def _update(self, step: int, result: StepResult, loads: Sums, trained: Mapping[str, Trainable[Any]]) -> None:
        """Turn the gradients of the `trained` models into updates. `loads` says how much each expert was used in the
        passes of the update. Raises StoppedError on every rank: a rank was asked to stop.
        """
        self.ranks.stop_if(self.stop.is_set(), updating=True)
        scale = result.lr_scales[-1] if result.lr_scales else 1.0
        updates = {name: model.update(step, scale if name == "policy" else 1.0) for name, model in trained.items()}
        policy = updates.get("policy")
        if self.balance.bias_rate and policy is not None and policy.is_applied:
            self.policy.module.loads.move_biases(self._over_ranks(loads), self.balance.bias_rate)
        if policy is not None and not policy.overflowed:
            result.norms.append(policy.norm)
        result.too_large += sum(each.too_large for each in updates.values())
        result.overflowed += sum(each.overflowed for each in updates.values())
        prefixes = {"critic": "value/", "implicit": "implicit/"}
        own = {prefixes[name]: each for name, each in updates.items() if name in prefixes and not each.overflowed}
        result.summary |= {f"{prefix}grad_norm": each.norm for prefix, each in own.items()}

    def _over_ranks(self, sums: Sums) -> Sums:
        return {name: self.ranks.sum_pass_groups(value) for name, value in sums.items()}

    def imitate(self, step: int, imitation: ImitationBatch) -> StepResult:
        """Make one update for each part of `imitation`, from demonstrations only."""
        result, sums = StepResult(), Sums()
        for index, passes in enumerate(imitation.passes):
            if passes:
                self._balance_by_loss(imitation.batch, passes)
            loads = self._imitate(imitation, index, sums)
            self._update(step, result, loads, self.models)
            add_sums(sums, loads)
        self._summarise(result, sums, len(imitation.passes), imitation)
        return result

    def imitation_loss(self, imitation: ImitationBatch) -> float:
        """Return the negative log-likelihood of `imitation`, as the sum over the learned tokens of all ranks."""
        passes = [members for update in imitation.passes for members in update]
        sums = imitation_nll(self.policy.module, self._passes(imitation.batch, passes))
        return float(self.ranks.merge(sums)[NLL])

    def _imitate(self, imitation: ImitationBatch, update: int, sums: Sums) -> Sums:
        passes = self._passes(imitation.batch, imitation.passes[update])
        return add_imitation_gradient(self.policy, passes, imitation, update, sums)

    def _summarise(
        self, result: StepResult, sums: Sums, updates: int, imitation: ImitationBatch | None
    ) -> dict[str, Tensor]:
        """Put the metrics that every kind of step has into `result`. Returns the sums over all ranks."""
        result.summary |= self._loss_scales()
        total = self.ranks.merge(sums)
        result.loss = float(total.pop(LOSS)) / updates
        if imitation is not None:
            result.summary |= imitation_summary(total, imitation)
        result.summary |= load_summary(total)
        return total

    def _loss_scales(self) -> dict[str, float]:
        prefixes = {"policy": "", "critic": "value/", "implicit": "implicit/"}
        scales = {prefixes[name]: model.loss_scale for name, model in self.models.items()}
        return {f"{prefix}loss_scale": each.scale for prefix, each in scales.items() if each is not None}


def _both(statistics: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the two statistics of each token, float32[N, 2]."""
    first, second = statistics
    assert second is not None
    return torch.stack([first, second], 1)
