from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.parts import param


class Prime(Advantage):
    """Token rewards of an implicit process model plus the outcome, each minus its mean over the group's other members.

    Formula: A_t = whiten(sum_{s>=t} gamma^(s-t) (r_s - m) + outcome_weight (outcome - m')); r_t = beta log(pi_phi /
    pi_ref), with pi_phi the implicit process model; m and m' are the means of r and of the outcome over the group's
    other members
    Use: to reward every token when steps have no labels: the learner trains pi_phi on outcomes (implicit.train=true)
    Source: Process Reinforcement through Implicit Rewards, 2025
    Caveat: without implicit.train, the rewards r_s are the step scores of the labels, at the ends of the steps. A
    scorer that gives every token the score r_t leads to the same result.
    """

    name = "prime"
    needs_steps = True
    needs_group = True
    uses_reward = False

    beta: float = param(0.05, "scale of the implicit reward", "(0, inf)")
    gamma: float = param(1.0, "discount per policy token", "[0, 1]")
    outcome_weight: float = param(1.0, "weight of the outcome", "[0, inf)")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        rewards = (
            self._token_rewards(rollouts) if rollouts.tokens.implicit is not None else self._step_rewards(rollouts)
        )
        returns = linear_scan(rollouts.view.decay(self.gamma, rewards), rewards)
        outcome = self.outcome_weight * rollouts.episodes.groups.leave_one_out(rollouts.episodes.outcome)
        return Estimate(rollouts.whiten(returns + rollouts.spread(outcome)), returns)

    def _token_rewards(self, rollouts: Rollouts) -> Tensor:
        """float[M]: every policy token's reward, minus the mean token reward of the group's other members."""
        assert rollouts.tokens.implicit is not None
        view, count = rollouts.view, rollouts.episodes.count
        rewards = self.beta * view.take(rollouts.tokens.implicit)
        mean = torch.zeros(count, dtype=torch.float64, device=rewards.device)
        mean = rollouts.reduce(mean.index_copy_(0, view.owner, view.sequences.mean(rewards)))
        return rewards - rollouts.spread(_others(rollouts.episodes.groups, mean))

    def _step_rewards(self, rollouts: Rollouts) -> Tensor:
        """float[M]: on the last token of every step, its score minus the mean step score of the group's other
        members."""
        episodes = rollouts.episodes
        steps = Groups(episodes.step_sequence, episodes.count)
        mean = steps.total(episodes.step_scores) / steps.total(torch.ones_like(episodes.step_scores)).clamp(min=1)
        return rollouts.at_steps(episodes.step_scores - _others(episodes.groups, mean)[episodes.step_sequence])


def _others(groups: Groups, values: Tensor) -> Tensor:
    """float64[S]: the mean over the group's other members, 0 for a single member."""
    return (groups.sum(values) - values) / (groups.size() - 1).clamp(min=1)
