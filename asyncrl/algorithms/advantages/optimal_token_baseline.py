from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, TokenAdvantage
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.parts import param

EPSILON = 1e-8


class OptimalTokenBaseline(TokenAdvantage):
    """The return of each token minus a baseline: the weighted mean return of the group's members at the same token.

    A member's weight is the sum of its squared gradient norms (with respect to the logits) up to that token.

    Formula: A_t = G_t - sum(G_t E_t) / (sum(E_t) + 1e-8), with both sums over the members of the group that have a
    token t; G_t = r_t + gamma G_{t+1}; E_t = sum_{j<=t} (1 - 2 pi_j + sum_v pi_j(v)^2) min(w_j, cap)^2; pi_j is the
    probability of token j under the proximal policy, and pi_j(v) is the probability of the vocabulary's token v at the
    same position; w = pi_prox / mu; with cap=null, E_t has no factor min(w_j, cap)^2
    Use: for long episodes of different lengths, where the group's mean as a baseline leaves gradients with a high
    variance
    Source: The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL, 2026; multi_turn=true is verl's
    tir_optimal_token_baseline, and multi_turn=false its optimal_token_baseline
    Caveat: it needs the proximal policy's distributions over the vocabulary, from a forward pass before the update.
    With zero_tail, the baseline is 0 at every t that only one member has. In verl, it is 0 only at the end of the
    longest member, where all others have ended. The two rules can differ only with multi_turn=false: t then counts tool
    tokens, too, and other members may have a tool token at t. On every rank, the sums need 24 bytes for each token of
    each group's longest member.
    """

    name = "optimal_token_baseline"
    needs_group = True
    needs_collisions = True

    multi_turn: bool = param(
        True, "t counts policy tokens; false: t counts all tokens after the prompt, tool results included"
    )
    zero_tail: bool = param(True, "use the baseline 0 at every t that no other member of the group has")
    cap: float | None = param(
        None, "largest ratio w_j that E_t uses, for old data; null: E_t does not use the ratio", "(0, inf]"
    )

    def __call__(self, rollouts: Rollouts) -> Estimate:
        groups = rollouts.episodes.groups
        rewards = rollouts.rewards(self.step_weight)
        returns = linear_scan(rollouts.view.decay(self.gamma, rewards), rewards)
        energy = self._energy(rollouts)
        place, total = self._places(rollouts)
        sums = energy.new_zeros(3, total)
        for row, each in zip(sums, (returns * energy, energy, torch.ones_like(energy)), strict=True):
            row.index_add_(0, place, each)
        weighted, weights, members = rollouts.reduce(sums)
        baseline = weighted / (weights + EPSILON)
        if self.zero_tail:
            baseline = torch.where(members == 1, 0.0, baseline)
        baseline = baseline.index_select(0, place)
        if not self.zero_tail:
            baseline = torch.where(rollouts.view.by_sequence(groups.size() == 1), 0.0, baseline)
        return Estimate((returns - baseline).to(rollouts.dtype), returns)

    def _energy(self, rollouts: Rollouts) -> Tensor:
        """float64[M]: the sum of squared gradient norms, from the sequence's start to the token."""
        tokens, view = rollouts.tokens, rollouts.view
        assert tokens.proximal is not None
        assert tokens.collisions is not None
        energy = 1 - 2 * view.take(tokens.proximal).double().exp() + view.take(tokens.collisions).double()
        if tokens.restricted is not None:
            energy.masked_fill_(view.take(tokens.restricted), 0.0)  # Restricted tokens have no gradient.
        energy.clamp_(min=0)  # Only rounding can make it negative.
        if self.cap is not None:
            energy *= rollouts.ratio.double().clamp(max=self.cap).square()
        # The tensors are flipped, because linear_scan sums from the last token to the first. torch.cumsum would not be
        # deterministic on GPUs.
        goes_on = torch.ones_like(energy).index_fill_(0, _firsts(rollouts)[view.sequences.lengths > 0], 0.0)
        return linear_scan(goes_on.flip(0), energy.flip(0)).flip(0)

    def _places(self, rollouts: Rollouts) -> tuple[Tensor, int]:
        """int64[M]: the index of each token in a table, and the table's length.

        The table has a row for each group, with a place for each t = 0, 1, .... The rows are concatenated.
        """
        view, episodes = rollouts.view, rollouts.episodes
        t = torch.arange(view.index.numel(), device=view.index.device)
        if not self.multi_turn:
            t = rollouts.tokens.position[view.index]
        firsts = torch.cat([t, t.new_zeros(1)])[_firsts(rollouts)]
        t = t - view.sequences.spread(firsts)
        own = torch.zeros(view.owner.numel(), dtype=torch.float64, device=t.device)
        own[view.sequences.lengths > 0] = t[view.sequences.last].double() + 1
        lengths = rollouts.reduce(own.new_zeros(episodes.count).index_copy_(0, view.owner, own))
        rows = lengths.new_zeros(episodes.groups.count).index_copy_(
            0, episodes.group, episodes.groups.greatest(lengths)
        )
        starts = rows.long().cumsum(0) - rows.long()
        return t + view.by_sequence(starts[episodes.group]), int(rows.sum())


def _firsts(rollouts: Rollouts) -> Tensor:
    """int64[R]: the index in [M] of each sequence's first policy token. For a sequence without policy tokens, it is the
    index of the next sequence's first policy token."""
    lengths = rollouts.view.sequences.lengths
    return lengths.cumsum(0) - lengths
