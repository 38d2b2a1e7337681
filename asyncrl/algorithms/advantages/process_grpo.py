from __future__ import annotations

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.parts import param


class ProcessGrpo(Advantage):
    """Normalised step scores, summed over the current and all later steps.

    Formula: A_t = (sum of s_k over the steps k that end at or after t) + outcome_weight o; s_k is the score of step k,
    normalised over all steps of the group, and o the outcome, normalised over the outcomes of the group
    Use: when a process model can tell right steps from wrong steps
    Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024 (process
    supervision)
    Caveat: the sum rewards an episode for more good steps; `pure` and `grpo_turns` do not.
    """

    name = "process_grpo"
    needs_steps = True
    uses_reward = False

    normalise_std: bool = param(True, "divide step scores, and outcomes, by their standard deviation in the group")
    outcome_weight: float = param(0.0, "weight of the normalised outcome, added to every token", "[0, inf)")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        episodes = rollouts.episodes
        steps = Groups(episodes.group[episodes.step_sequence], episodes.groups.count)
        advantages = rollouts.after(steps.normalise(episodes.step_scores, self.normalise_std))
        if self.outcome_weight:
            outcome = episodes.groups.normalise(episodes.outcome, self.normalise_std)
            advantages = advantages + self.outcome_weight * rollouts.spread(outcome)
        return Estimate(advantages)
