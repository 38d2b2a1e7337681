from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, TokenAdvantage
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class CompactionGae(TokenAdvantage):
    """Generalised advantage estimation for agents that compact their context: it runs within each branch of an episode,
    and earlier branches get less credit, by the number of tokens that follow them.

    Formula: A_t = (gamma lam)^n B_t, with B_t = delta_t + gamma lam B_{t+1} within the branch. n is the number of
    policy tokens in the episode's later branches. Each branch ends with the whole reward and the value 0. The critic's
    target is R_t = B_t + V_t
    Use: with a critic, if agents summarise or rewrite their history; choose aggregation token-mean. gae would compare
    the value at the end of a branch with the value of another context
    Source: CompactionRL: Reinforcement Learning with Context Compaction for Long-Horizon Agents, 2026 (equations 13 and
    14); VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks, 2025 (alpha)
    Caveat: with lam well below 1, branches far from the end learn nothing. CompactionRL uses alpha=1.5; it does not say
    if l is the length of the branch or of the episode (here: of the episode), nor what the critic learns. Branches that
    ran at the same time count as one after the other.
    """

    name = "compaction_gae"
    needs_critic = True

    lam: float = param(1.0, "lambda; 1: n does not matter if gamma is 1", "[0, 1]")
    alpha: float | None = param(
        None, "lambda is 1 - 1 / (alpha l), with l the policy tokens of the episode; null: lam for all", "[1, inf)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and self.lam != 1:
            raise ConfigError(f"{self.setting('lam')}: alpha={self.alpha} sets lambda; leave lam at 1.0, or alpha null")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        values, view = rollouts.values, rollouts.view
        assert values is not None
        branches = view.branches(rollouts.tokens.branch)
        ends, decay = branches.last, self.gamma * self._lam(rollouts)
        following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))]).index_fill_(0, ends, 0.0)
        delta = rollouts.rewards(self.step_weight, ends) + self.gamma * following - values
        local = linear_scan(decay.to(delta.dtype).index_fill(0, ends, 0.0), delta)
        last = view.sequences.spread(view.sequences.lengths.cumsum(0))
        later = last - branches.spread(branches.lengths.cumsum(0))
        return Estimate(local * decay.pow(later).to(local.dtype), local + values)

    def _lam(self, rollouts: Rollouts) -> Tensor:
        """float64[M]: the lambda of each token."""
        lengths = rollouts.view.sequences.lengths
        if self.alpha is None:
            lam = torch.full_like(lengths, self.lam, dtype=torch.float64)
        else:
            lam = 1 - 1 / (self.alpha * lengths.clamp(min=1).double())
        return rollouts.view.sequences.spread(lam)
