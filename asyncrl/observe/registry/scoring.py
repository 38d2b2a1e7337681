"""The metrics of a scorer."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, text = made_by("scoring")

METRICS = (
    counter(
        "labelled",
        "trajectories",
        "trajectories with final labels since the start, those of evaluations included",
    ),
    counter(
        "handed_on",
        "trajectories",
        "trajectories that got labels here and still need another kind of scores, since the start",
    ),
    counter("failed", "trajectories", "trajectories whose scoring failed, since the start"),
    counter("refused", "trajectories", "trajectories whose labels the replay refused, since the start"),
    counter(
        "waited",
        "trajectories",
        "trajectories given back to the replay because a service was unavailable, since the start",
    ),
    text("unavailable", "text", "each kind of scores whose service is unavailable now, and the reason"),
    gauge("tokens_per_s", "tokens/s", "tokens of scored trajectories a second, since the last row"),
    gauge("idle", "share", "share of the time since the last row in which there was no trajectory to score"),
    gauge("reward_mean", "reward", "mean reward since the last row"),
    gauge("outcome_mean", "outcome", "mean outcome since the last row"),
    gauge(
        "accuracy_mean",
        "share",
        "episodes whose first rule or manager gave more than 0.5, since the last row",
    ),
    gauge("rule/RULE_mean", "", "mean score of a rule"),
    gauge("manager/NAME_mean", "", "mean of a number that a reward manager gave as extra information"),
    gauge("rules_mean", "", "mean of the rules' part of the reward, unweighted"),
    gauge("manager_mean", "", "mean of the manager's part of the reward, unweighted"),
    gauge("process_mean", "", "mean of the aggregated step scores (a part of the reward), unweighted"),
    gauge("environment_mean", "", "mean of the environment's part of the reward, unweighted"),
    gauge(
        "PART_mean", "", "mean of another part of the reward: weighted if it is a bonus or a penalty, else unweighted"
    ),
    gauge("steps_per_answer", "steps", "mean number of steps of an episode"),
    gauge("length_mean", "tokens", "mean number of sampled tokens of an episode"),
    gauge("first_step_share", "share", "sampled tokens that are in the first step"),
    gauge("repeated_steps", "share", "steps that repeat another step"),
    gauge(
        "prm_agreement",
        "share",
        "episodes on which the process model's aggregated step score and the rules agree; absent without such a model",
    ),
    gauge(
        "step_scores/POSITION/BIN",
        "share",
        "scores of the steps at POSITION (first, inner or last) that are in this bin, before shaping. BIN is below_0, "
        "from_0, from_0.25, from_0.5 or from_0.75",
    ),
    gauge(
        "hack_alarm",
        "0 or 1",
        "1 while the mean reward rises, outcomes do not, and prm_agreement falls; absent without prm_agreement",
    ),
    counter("hack_alarms", "alarms", "times that hack_alarm became 1, since the start"),
)
