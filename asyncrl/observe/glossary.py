"""Every metric that a role logs: names, unit and meaning. docs/metrics.md is generated from this file:
`python -m asyncrl.observe.glossary docs/metrics.md`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Metric(NamedTuple):
    """Metrics of one meaning. Words in capital letters in `names` stand for any text."""

    names: str
    unit: str
    meaning: str


class MetricsFile(NamedTuple):
    """The metrics of one kind of file in `metrics/`. `step` is what its column of that name counts."""

    files: str
    rows: str
    step: str
    metrics: Sequence[Metric]


COMMON = (
    Metric("step", "", "see each file below"),
    Metric("time", "s", "when the row was written, since 1970"),
    Metric("metrics/lost", "rows", "rows that a sink could not take; only if there are any"),
)

LEARNER = (
    Metric("reward/mean, reward/std, reward/min, reward/max", "reward", "rewards of the trained trajectories"),
    Metric("outcome/mean", "outcome", "mean outcome of the trained trajectories: what the first rule gave"),
    Metric("groups/zero_variance", "share", "groups whose rewards are all equal: they teach nothing"),
    Metric("length/mean, length/max", "tokens", "sampled tokens of a trajectory"),
    Metric("loss", "", "mean loss of the step's updates"),
    Metric("loss/policy, loss/kl, loss/entropy", "", "the terms of the loss, mean over the step's minibatches"),
    Metric("grad_norm", "", "mean norm of the policy's gradients before clipping, without those that are not finite"),
    Metric("lr", "", "the policy's learning rate"),
    Metric("version", "version", "the policy version before the step"),
    Metric("tokens", "tokens", "all tokens of the step's trajectories"),
    Metric("tokens_sampled", "tokens", "the tokens among them that the policy sampled"),
    Metric("trajectories_trained", "trajectories", "trained trajectories since the run's start"),
    Metric("updates_empty", "updates", "updates since the run's start that were left out: nothing to learn from"),
    Metric("updates_skipped", "updates", "updates since the run's start that were left out: gradient not finite"),
    Metric(
        "updates_too_large",
        "updates",
        "updates of any model that learner.skip_grad_norm left out since the run's start",
    ),
    Metric("steps_skipped", "steps", "steps since the run's start that trained nothing, since their plan was skipped"),
    Metric("lag/mean, lag/max", "versions", "lags of the trained trajectories"),
    Metric(
        "lag/LAG", "trajectories", "trained trajectories with that lag; the one above replay.max_lag holds the rest"
    ),
    Metric("token_lag/mean", "versions", "mean lag of the sampled tokens"),
    Metric("token_lag/LAG", "share", "sampled tokens with that lag; 16: 16 or more"),
    Metric("mismatch/ess", "share", "effective sample size (sum w)^2 / (N sum w^2) of the raw importance weights w"),
    Metric("mismatch/kl, mismatch/k3", "nats", "KL from behaviour to proximal policy, as k1 and as k3"),
    Metric("mismatch/chi_square", "", "mean w^2 - 1"),
    Metric("mismatch/agree", "share", "tokens on which engine and learner agree: abs(log w) <= 1e-4"),
    Metric("mismatch/perplexity_ratio", "ratio", "mean over sequences of exp(mean log mu - mean log pi_prox)"),
    Metric("update/kl, update/k3", "nats", "KL from proximal to trained policy, as k1 and as k3"),
    Metric(
        "weight/mean, weight/ess", "", "mean and effective sample size of the corrected weights; dropped tokens are 0"
    ),
    Metric("clip/high, clip/low, clip/BOUND", "share", "tokens beyond each bound of the loss"),
    Metric("masked/CORRECTION", "share", "tokens that a correction drops"),
    Metric("masked/any", "share", "tokens that any correction drops"),
    Metric("noop", "0 or 1", "1 if no token was left to learn from"),
    Metric("advantage/mean, advantage/std", "", "advantages of the kept tokens"),
    Metric("advantage/positive", "share", "kept tokens with a positive advantage"),
    Metric("return/mean, return/std", "", "returns of the sampled tokens; only with a critic"),
    Metric("value/bias", "", "mean error of the critic's values"),
    Metric("value/explained_variance", "share", "variance of the returns that the critic explains"),
    Metric("value/clipped", "share", "tokens whose value the critic's loss clips"),
    Metric("value/grad_norm", "", "the critic's gradient norm before clipping"),
    Metric("implicit/loss, implicit/grad_norm", "", "loss and gradient norm of the implicit process model"),
    Metric("implicit/accuracy", "share", "outcomes, right if above 0.5, that the implicit process model predicts"),
    Metric("entropy", "nats", "mean entropy of the policy; only if it is computed"),
    Metric("kl_reference", "nats", "KL from the policy to the reference; only if there is one"),
    Metric("kl_reference/weight", "", "its weight in the reward or in the loss"),
    Metric("weights/bytes, weights/delta_bytes", "bytes", "size of the newest version, whole and as a delta"),
    Metric("weights/density", "share", "numbers that the newest delta changes"),
    Metric("weights/prepare_s", "s", "time until the newest version could be offered"),
    Metric("weights/refused", "requests", "requests for weights that the learner refused since its start"),
    Metric("weights/broadcasts, weights/broadcast_failures", "broadcasts", "since the learner's start"),
    Metric("weights/folder_failures", "versions", "versions that could not be written to a folder"),
    Metric("seconds/step", "s", "the whole step"),
    Metric("seconds/wait, seconds/fetch", "s", "waiting for a batch, and fetching it"),
    Metric("seconds/proximal, seconds/train", "s", "forward passes before the updates, and the updates"),
    Metric("seconds/publish, seconds/checkpoint", "s", "publishing weights, and writing a checkpoint"),
    Metric("idle", "share", "(seconds/wait + seconds/fetch) / seconds/step"),
    Metric("tokens_per_s", "tokens/s", "tokens / seconds/step"),
)

EVALUATION = (
    Metric("eval/outcome", "outcome", "mean outcome of the held-out tasks: what the first rule gave"),
    Metric("eval/accuracy", "share", "held-out tasks with an outcome of 1 or more"),
    Metric("eval/reward", "reward", "mean reward of the held-out tasks"),
    Metric("eval/count, eval/failed", "episodes", "scored episodes, over which the means are taken; failed ones"),
    Metric("eval/version", "version", "the version to be measured"),
    Metric("eval/newest_version", "version", "the newest version that sampled a token: an engine may be ahead"),
    Metric(
        "eval/tokens, eval/newer_tokens", "tokens", "sampled tokens, and those from versions newer than eval/version"
    ),
)

ACTOR = (
    Metric("episodes, truncated", "episodes", "delivered since the start, and those that a limit ended"),
    Metric("failed, refused", "episodes", "failed since the start; those that the replay refused"),
    Metric("running", "episodes", "running now"),
    Metric("version", "version", "the version that the engine serves"),
    Metric("tokens", "tokens", "sampled since the start"),
    Metric("tokens_per_s", "tokens/s", "sampled since the last row"),
    Metric("seconds, idle_seconds", "s", "since the start, and those in which the engine had no request"),
    Metric("idle", "share", "time since the last row in which the engine had no request"),
    Metric("episode_tokens_mean, episode_tokens_max", "tokens", "of the episodes since the last row, prompts included"),
    Metric("turns_mean, turns_max", "turns", "the assistant's, of the episodes since the last row"),
    Metric("wait_s, generate_s, tools_s, agent_s, PHASE_s", "s", "mean time that an episode spent in each phase"),
    Metric("tool_calls, tool_refused", "calls", "of tools, since the start; those that the tool refused"),
    Metric("tool_malformed, tool_unknown", "calls", "not well formed; of tools that do not exist"),
    Metric("tool_failures", "tries", "tries of a tool that failed, since the start"),
    Metric("chat_api_answered, chat_api_refused", "requests", "of agents, since the start"),
    Metric("chat_api_abandoned", "requests", "whose agent did not wait for the answer"),
    Metric("agent/NAME", "number", "mean of a metric that agents returned, over the episodes since the last row"),
    Metric("chat_api_branches", "branches", "sequences that agents made of their histories"),
    Metric("weights_updates, weights_refused", "versions", "taken since the start; refused"),
    Metric("weights_fallbacks", "versions", "that came by another channel than the first"),
    Metric("weights_bytes", "bytes", "received since the start"),
    Metric("weights_transfer_s, weights_switch_s", "s", "spent on transfers, and until the engine had switched"),
    Metric("servers, servers_ready", "servers", "of the fleet now, and those that take requests"),
    Metric("servers_leased", "servers", "held back for an evaluation now"),
    Metric("server_faults, server_updates", "", "faults of servers, and their updates of weights, since the start"),
    Metric("segments, cut_segments, lost_segments", "segments", "requests to servers; interrupted ones; failed ones"),
)

SCORING = (
    Metric("labelled, handed_on", "trajectories", "with final labels since the start; with labels for a next kind"),
    Metric("failed, refused", "trajectories", "whose scoring failed; whose labels the replay refused"),
    Metric("waited", "trajectories", "that went back because a service was unavailable"),
    Metric("tokens_per_s", "tokens/s", "of scored trajectories, since the last row"),
    Metric("idle", "share", "time since the last row without a trajectory to score"),
    Metric("reward_mean, outcome_mean", "", "mean reward and outcome since the last row"),
    Metric("accuracy_mean", "share", "episodes whose first rule gave more than 0.5, since the last row"),
    Metric("rule/RULE_mean", "", "mean of what a rule gave"),
    Metric("rules_mean, process_mean, environment_mean, PART_mean", "", "mean of each part of the reward, unweighted"),
    Metric("steps_per_answer", "steps", "mean number of steps of an episode"),
    Metric("length_mean", "tokens", "mean number of sampled tokens of an episode"),
    Metric("first_step_share", "share", "sampled tokens that are in the first step"),
    Metric("repeated_steps", "share", "steps that repeat another one"),
    Metric("prm_agreement", "share", "episodes on which the aggregated step score and the rules agree"),
    Metric("step_scores/POSITION/BIN", "share", "scores of first, inner or last steps in each bin, before shaping"),
    Metric("hack_alarm", "0 or 1", "1 while the mean reward rises and prm_agreement falls"),
    Metric("hack_alarms", "alarms", "how often that began"),
)

REPLAY = (
    Metric("version", "version", "the newest published version"),
    Metric("committed, capacity", "trajectories", "admitted so far, and how many may be at this version"),
    Metric("accepted, labelled", "trajectories", "stored for training since the run's start; with final labels"),
    Metric("trained", "trajectories", "trained since the run's start, and covered by a checkpoint"),
    Metric("evicted", "trajectories", "thrown away as older than replay.max_lag"),
    Metric("filtered", "trajectories", "thrown away by replay.filter"),
    Metric("filtered/REASON", "groups", "refused by each filter"),
    Metric("dropped", "trajectories", "thrown away with their group, since a member failed too often"),
    Metric("dead", "trajectories", "that could not be scored, or were left out by hand"),
    Metric("late, late_labels", "", "trajectories and labels that came after their work was given to others"),
    Metric("duplicates", "trajectories", "that were sent twice; stored once"),
    Metric("failures, scoring_failures", "attempts", "episodes and scorings that failed"),
    Metric("tickets_redelivered, leases_redelivered", "", "sent again, since a reply was lost"),
    Metric("groups_reissued", "groups", "opened for a task whose earlier group was thrown away"),
    Metric("plans_skipped", "plans", "skipped by `asyncrl inspect skip-plan`"),
    Metric("tasks_passed_over", "tasks", "that the curriculum left out"),
    Metric("tokens_thrown_away", "tokens", "sampled for trajectories that were thrown away"),
    Metric("damaged", "trajectories", "whose stored data could not be read"),
    Metric("refused", "requests", "that were malformed or not allowed"),
    Metric("internal_errors", "errors", "of the replay itself: its log has each traceback"),
    Metric("dead_letters_dropped", "dead letters", "that made room for newer ones"),
    Metric("depth_pending, depth_tickets", "tickets", "that wait for an actor; that are open"),
    Metric("depth_groups, depth_ready", "groups", "that are open; that may be trained"),
    Metric("depth_data, depth_waiting", "trajectories", "whose tokens are stored; that wait for a scorer"),
    Metric("depth_plans, depth_dead, depth_again", "", "plans; dead letters; tasks to be run again"),
    Metric("store_bytes, high_water_bytes", "bytes", "in use; bound above which no group is opened"),
    Metric("dead_letter_bytes", "bytes", "of dead letters and their episodes"),
    Metric("actors, scorers", "processes", "that are known"),
    Metric("failed_handshakes", "handshakes", "of clients without the right keys"),
    Metric("dead_readers, lingering_readers", "processes", "that died, or stay, while they read the store"),
    Metric("learner_waited_for_episodes_s", "s", "since the start: more actors help"),
    Metric("learner_waited_for_labels_s", "s", "since the start: more scorers help"),
    Metric("learner_waited_for_store_s", "s", "since the start: a larger replay.max_store_gb helps"),
    Metric("failing", "text", "what fails and why, while few tickets are given since everything fails"),
    Metric("newest_failure", "text", "the newest failure, with the id of its episode"),
)

FILES: Mapping[str, MetricsFile] = {
    "learner": MetricsFile("learner.jsonl", "one row a learner step", "learner steps, from 0", LEARNER),
    "evaluation": MetricsFile(
        "evaluation.jsonl", "one row an evaluation", "learner steps that trained the measured weights", EVALUATION
    ),
    "actor": MetricsFile("actor-N.jsonl", "one row every 5 s", "the version that the engine serves", ACTOR),
    "scoring": MetricsFile("scoring-N.jsonl", "one row every 5 s", "trajectories labelled so far", SCORING),
    "replay": MetricsFile(
        "replay.jsonl, or replay-SHARD.jsonl", "one row every 5 s", "the newest published version", REPLAY
    ),
}

HEAD = """# Metrics

Each role writes its metrics into `runs/NAME/metrics/` as JSON lines, a row a line. The columns are numbers, and a few
texts. With pandas, which asyncrl does not install (`pip install pandas`):

<!-- not run here: it needs pandas and a run -->
```python
import pandas

steps = pandas.read_json("runs/demo/metrics/learner.jsonl", lines=True)
steps.plot("step", ["reward/mean", "lag/mean"])
```

A learner that resumes removes the rows of the steps that it trains again, so that each step has one row. The other
roles append. "Since the start" means since their process started; the replay's counters are those of the whole run
where nothing else is said. `observe.wandb=true` sends the same values to Weights & Biases.

An *outcome* is what the first rule gave, mostly 0 or 1. A *reward* is what the algorithm sees: the weighted sum of all
parts ([scoring.md](scoring.md)). Words in capital letters stand for a name or a number.

This page is generated from `asyncrl/observe/glossary.py`; `make docs` writes it anew.
"""


def unknown(kind: str, names: Iterable[str]) -> list[str]:
    """The names that the glossary lacks for a kind of file."""
    metrics = [*COMMON, *FILES[kind].metrics]
    patterns = [_pattern(name) for metric in metrics for name in metric.names.split(", ")]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(".+" if piece.isupper() else re.escape(piece) for piece in re.split(r"([A-Z]+)", name)))


def page() -> str:
    """docs/metrics.md."""
    head = f"\n## All files\n\n{_table(COMMON)}"
    return HEAD + head + "".join(_section(each) for each in FILES.values())


def _section(file: MetricsFile) -> str:
    return f"\n## {file.files}\nThis file has {file.rows}. `step` is {file.step}.\n\n{_table(file.metrics)}"


def _table(metrics: Iterable[Metric]) -> str:
    rows = [f"| {_code(metric.names)} | {metric.unit} | {metric.meaning} |\n" for metric in metrics]
    return f"| metric | unit | meaning |\n| --- | --- | --- |\n{''.join(rows)}"


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
