from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts, step_lengths
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.parts import param
from asyncrl.errors import InvariantError


class Pure(Advantage):
    """Min-form credit: an episode's process reward is nearly the score of its worst step.

    Formula: A_t = (sum of r*_k - b n_k over the steps k that end at or after t) + outcome_weight rloo(outcome); r*_k =
    softmax_k(-r_k / T) r_k, with r_k the score of step k, and T the temperature; n_k is the number of policy tokens of
    step k; b = (sum of r* over the steps of the group's other members) / (number of policy tokens of these members)
    Use: for learned step scores in [-1, 1]: with the plain sum of the scores, the policy could collect reward by many
    harmless steps
    Source: Stop Summation: Min-Form Credit Assignment Is All Process Reward Model Needs for Reasoning, 2025
    Caveat: verifiable outcomes should be at least a tenth of the reward, else the policy learns to write one very long
    step.
    """

    name = "pure"
    needs_steps = True
    needs_unit_steps = True
    uses_reward = False

    temperature: float = param(0.1, "temperature T; 0: only the worst step counts (the strict form)", "[0, inf)")
    outcome_weight: float = param(0.0, "weight of rloo(outcome), which is added to every token", "[0, inf)")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        episodes, groups = rollouts.episodes, rollouts.episodes.groups
        rewards = min_form(episodes, self.temperature)
        lengths = step_lengths(episodes, rollouts.tokens, rollouts.view)
        own = Groups(episodes.step_sequence, episodes.count).total(rewards)
        others = (groups.sum(episodes.lengths) - episodes.lengths).clamp(min=1)
        rate = (groups.sum(own) - own) / others
        advantages = rollouts.after(rewards - rate[episodes.step_sequence] * lengths)
        if self.outcome_weight:
            outcome = groups.leave_one_out(episodes.outcome)
            advantages = advantages + self.outcome_weight * rollouts.spread(outcome)
        return Estimate(advantages)


def min_form(episodes: Episodes, temperature: float) -> Tensor:
    """r* float64[K]: each step's score times its softmax weight among the steps of its sequence. The lowest score has
    the largest weight. At temperature 0, the lowest scores share the whole weight equally.

    Raises InvariantError: a score lies outside [-1, 1].
    """
    scores = episodes.step_scores.double()
    if scores.numel() and float(scores.abs().max()) > 1:
        raise InvariantError(f"step_scores reach {float(scores.abs().max())}: pure needs scores in [-1, 1]")
    steps = Groups(episodes.step_sequence, episodes.count)
    if temperature == 0:
        worst = (scores == steps.least(scores)).double()
        return worst / steps.sum(worst) * scores
    weights = ((steps.least(scores) - scores) / temperature).exp()
    return weights / steps.sum(weights) * scores
