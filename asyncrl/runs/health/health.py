"""Judges the health of a run, in sentences that say what is wrong and what helps.

Each rule is a small function from the evidence to a finding, and its docstring says what it finds. The console, the
page, the report and the summary show these sentences, and decide nothing themselves. A new rule is one more function in
`RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from asyncrl.runs.health import trends
from asyncrl.runs.health.drift import faded_weights, runaway_kl
from asyncrl.runs.health.evidence import MALFORMED, TRUNCATED, Evidence, recent_counts
from asyncrl.runs.health.finding import FEWEST_STEPS, LONG_WINDOW, WINDOW, Finding, Rule, last_steps, steps_text
from asyncrl.runs.health.trends import Trend, values_of
from asyncrl.runs.lines import Row

FEWEST_EPISODES = 30
MAX_FAILED_SHARE = 0.1
MAX_TRUNCATED = 0.5
FEWEST_CALLS, MAX_MALFORMED = 20, 0.25
MAX_REFUSED, FEWEST_REFUSED = 0.9, 64
"""A filter counts as refusing nearly everything if it refused this share of the episodes, and at least this number of
them."""
NEARLY_ALL = 0.9
LEAST_KEPT = 0.5
"""A run is unhealthy if less than this share of the adapters' change is left in the published weights."""
SOLVED = 0.95
"""A batch counts as solved if its mean outcome is at least this. An outcome is mostly 0 or 1."""
FEWEST_FOR_TREND = 30
"""The trend of the reward is judged from this number of steps on."""
ENTROPY_FALL, LEAST_ENTROPY = 0.25, 0.02
"""An entropy has collapsed if its first value was at least LEAST_ENTROPY nats, and it is now below ENTROPY_FALL times
its first value."""
ENTROPY_RISE, ENTROPY_RISE_BY = 2.0, 1.0
"""An entropy has run away if it has grown by more than the factor ENTROPY_RISE, and by more than ENTROPY_RISE_BY
nats."""
OLD_DATA = 4.0
"""The smallest mean age of data, in versions, that can be the reason for a fall."""


@dataclass(frozen=True, slots=True)
class Health:
    """The findings about a run, in the order of the rules. `trends` has the trends of the reward and of the
    held-out accuracy."""

    findings: Sequence[Finding]
    trends: dict[str, Trend]

    @property
    def warnings(self) -> list[str]:
        return [each.text for each in self.findings if not each.is_good]

    @property
    def remarks(self) -> list[str]:
        return [each.text for each in self.findings if each.is_good]


def judge(seen: Evidence) -> Health:
    """Judge a run by all rules."""
    findings = [finding for rule in RULES if (finding := rule(seen)) is not None]
    shown = {
        "reward": trends.of_steps(seen.first, seen.newest, "reward/mean"),
        "held-out accuracy": trends.of_evaluations(seen.evaluations, "eval/accuracy"),
    }
    return Health(findings, {name: trend for name, trend in shown.items() if trend is not None})


def _are_solved(rows: Sequence[Row]) -> bool:
    outcomes = values_of(rows, "outcome/mean")
    return len(outcomes) == len(rows) and min(outcomes) >= SOLVED


def learns_nothing(seen: Evidence) -> Finding | None:
    """Every reward of the last steps was the same, or the gradient of each of these steps was 0."""
    rows = last_steps(seen, WINDOW, WINDOW)
    if not rows:
        return None
    steps, level = steps_text(rows), all(row.get("groups/zero_variance") == 1 for row in rows)
    rewards = {row.get(f"reward/{end}") for row in rows for end in ("min", "max")}
    is_one = len(rewards) == 1 and None not in rewards
    if (is_one or (level and all(row.get("grad_norm") == 0 for row in rows))) and _are_solved(rows):
        return _solved(seen, rows)
    if is_one:
        look = f"`asyncrl inspect step {seen.folder} {rows[-1]['step']}` shows some of the episodes"
        return Finding(
            "reward",
            f"every reward of {steps} was {next(iter(rewards)):g}, which teaches nothing: {look}. "
            "Check the scoring rule, and whether the task is too hard or too easy for the model",
        )
    if any(row.get("grad_norm") != 0 for row in rows):
        return None
    why = (
        "the rewards within each group were equal (groups/zero_variance). Use a larger learner.group_size, or tasks "
        "that the policy solves sometimes"
        if level
        else "the gradient was 0. Look at masked/any, the share of the tokens that the corrections leave out"
    )
    return Finding("empty", f"{steps} learned nothing (updates_empty): {why}")


def _solved(seen: Evidence, rows: Sequence[Row]) -> Finding:
    """Say that the tasks of the newest `rows` are solved. This is a warning if they were solved from the first step on,
    and otherwise a remark."""
    if seen.first and _are_solved([*seen.first, *seen.spread]):
        return Finding(
            "solved",
            "nearly every episode has been right since the first step, so that nothing is learned: the model can solve "
            "the tasks already, or the scoring rule calls every answer right. Look at some of the episodes "
            f"(`asyncrl inspect step {seen.folder} {rows[-1]['step']}`), and try the rule with a wrong answer",
        )
    return Finding(
        "solved",
        f"the policy solves the tasks of {steps_text(rows)}: nearly every episode is right, so that they teach nothing "
        "more. This is a success, not a fault; harder tasks would teach more",
        is_good=True,
    )


def equal_groups(seen: Evidence) -> Finding | None:
    """Nearly all groups have equal rewards, so only a few groups have different rewards to learn from."""
    rows = last_steps(seen, LONG_WINDOW, FEWEST_STEPS)
    shares = values_of(rows, "groups/zero_variance")
    if len(shares) < FEWEST_STEPS or fmean(shares) < NEARLY_ALL or (seen.group_size or 1) < 2:
        return None
    if learns_nothing(seen) is not None:
        return None
    if _are_solved(rows):
        return _solved(seen, rows)
    return Finding(
        "equal",
        f"in {fmean(shares):.0%} of the groups of {steps_text(rows)} all rewards were equal (groups/zero_variance), so "
        "that these groups teach nothing. Use tasks that the policy solves sometimes, a larger learner.group_size, or "
        "a reward with more levels",
    )


def skipped_updates(seen: Evidence) -> Finding | None:
    """Updates were left out because their gradient was not finite."""
    if not seen.newest or not (skipped := seen.newest[-1].get("updates_skipped")):
        return None
    return Finding(
        "skipped",
        f"{skipped:.0f} updates were left out, since their gradient was not finite (updates_skipped). "
        "Try a smaller learner.lr, or model.dtype=float32",
    )


def failing_episodes(seen: Evidence) -> Finding | None:
    """So many episodes or scorings have failed that the trained ones may be a biased sample."""
    counts = seen.counts
    failed = counts.get("dead", 0) + counts.get("failures", 0)
    episodes = counts.get("accepted", 0) + counts.get("failures", 0)
    if episodes < FEWEST_EPISODES or failed <= MAX_FAILED_SHARE * episodes:
        return None
    newest = f"; newest failure: {seen.newest_failure}" if seen.newest_failure else ""
    of_all = f"{failed / episodes:.0%} of the episodes ({failed:.0f} of {episodes:.0f})"
    rest = "The run trains only on the rest, a biased sample" if failed < episodes else "Nothing is left to train on"
    return Finding(
        "failing",
        f"{of_all} failed or could not be scored. {rest}{newest}. `asyncrl inspect dead-letters {seen.folder}` lists "
        "the failures; actor.max_failure_share can end such a run",
    )


def biased_selection(seen: Evidence) -> Finding | None:
    """The age bound chooses the trained episodes by their length, turns or reward."""
    biased = seen.selection.biased()
    if not biased:
        return None
    trained, evicted = seen.selection.of("trained").means, seen.selection.of("evicted").means
    means = ", ".join(f"{name} {trained[name]:.4g} and {evicted[name]:.4g}" for name in biased)
    return Finding(
        "selection",
        "the trained episodes differ, by more than chance explains, from those thrown away as too old, so that the run "
        f"learns from a biased sample. Means of the trained and of the others: {means}. Raise replay.max_lag, or lower "
        "actor.concurrency if engines make as many tokens a second with fewer requests at once",
    )


def refusing_filter(seen: Evidence) -> Finding | None:
    """The filters refuse every group, or nearly every one."""
    if seen.refusing:
        return Finding("filter", seen.refusing)
    if seen.solved:
        return Finding("filter", seen.solved, is_good=True)
    filtered, accepted = seen.counts.get("filtered", 0), seen.counts.get("accepted", 0)
    if not accepted or filtered < FEWEST_REFUSED or filtered < MAX_REFUSED * accepted:
        return None
    return Finding(
        "filter",
        f"replay.filter refused {filtered / accepted:.0%} of the episodes ({filtered} of {accepted}), so that few are "
        f"trained: `asyncrl inspect status {seen.folder}` has the reasons. Use tasks that the policy solves "
        "sometimes, or a filter that refuses less",
    )


def truncated_episodes(seen: Evidence) -> Finding | None:
    """Most of the newest episodes were ended by a limit."""
    part, whole = recent_counts(seen.actors, *TRUNCATED)
    if whole < FEWEST_EPISODES or part < MAX_TRUNCATED * whole:
        return None
    return Finding(
        "truncated",
        f"{part / whole:.0%} of the newest {whole:.0f} episodes were truncated: a limit ended them before the policy "
        "did. Look at some of them, then raise actor.max_turn_tokens, actor.max_tokens or actor.max_turns, or lower "
        "learner.lr if the policy has begun to ramble",
    )


def malformed_calls(seen: Evidence) -> Finding | None:
    """Many of the newest tool calls could not be parsed, or named no tool."""
    part, whole = recent_counts(seen.actors, *MALFORMED)
    if whole < FEWEST_CALLS or part < MAX_MALFORMED * whole:
        return None
    return Finding(
        "malformed",
        f"{part / whole:.0%} of the newest {whole:.0f} tool calls were malformed or named an unknown tool. Look at "
        "some episodes: the policy may need demonstrations (`asyncrl sft`), another actor.tool_call_format, or a "
        "smaller learner.lr if its calls were well formed before",
    )


def worse_held_out(seen: Evidence) -> Finding | None:
    """The last held-out result is far below the best, or below the first by more than one standard error of the
    difference. If the error is unknown, any difference to the first counts."""
    for name in ("accuracy", "outcome"):
        trend, best = (of(seen.evaluations, f"eval/{name}") for of in (trends.of_evaluations, trends.since_best))
        if best is not None and best.way == "down":
            fallen, since = best, "best"
        elif trend is not None and trend.first - trend.last > (trend.noise / 2 if trend.noise < 1 else 0):
            fallen, since = trend, "first"
        else:
            continue
        step = seen.evaluations[-1]["step"]
        return Finding(
            "held_out",
            f"the held-out {name} is {fallen.last:.3g} after {step} steps, below the {fallen.first:.3g} of the {since} "
            f"evaluation ({fallen.noise_text}). Compare the rewards of some episodes with their texts: the policy "
            "may exploit the reward, or have forgotten what it could do. A smaller learner.lr or a KL to the reference "
            f"helps against both{_age_of_data(seen)}",
        )
    return None


def _age_of_data(seen: Evidence) -> str:
    """The end of the advice: it names the age of the data if the data are old, and else is empty."""
    ages = values_of(seen.newest[-LONG_WINDOW:], "lag/mean")
    if not ages or fmean(ages) < OLD_DATA:
        return ""
    return (
        f". Old data may be the reason, too: they were {fmean(ages):.1f} versions old on average. A smaller "
        "replay.max_lag or another correction may help (docs/studies.md)"
    )


def reward_trend(seen: Evidence) -> Finding | None:
    """The reward has not risen since the beginning of a long run, or it has fallen."""
    rows, rewards = seen.spread, values_of(seen.spread, "reward/mean")
    if len(rewards) < FEWEST_FOR_TREND or rows[-1]["step"] - rows[0]["step"] + 1 < FEWEST_FOR_TREND:
        return None
    if _are_solved(rows[-FEWEST_STEPS:]):
        return None
    part = len(rewards) // 3
    begin, end = rewards[:part], rewards[-part:]
    noise = 2 * ((stdev(begin) ** 2 + stdev(end) ** 2) / part) ** 0.5
    change = Trend(fmean(begin), fmean(end), noise)
    outcomes = values_of(rows[-part:], "outcome/mean")
    is_nearly_solved = bool(outcomes) and fmean(outcomes) >= NEARLY_ALL
    if change.way == "up" or (not change.way and is_nearly_solved):
        return None
    said = f"{change.first:.3g} in the first third of {steps_text(rows)} and {change.last:.3g} in the last"
    if change.way == "down":
        return Finding("reward_falls", f"the reward falls: it was {said} ({change.noise_text}). Try a lower learner.lr")
    return Finding(
        "reward_still",
        f"the reward does not rise: it was {said} ({change.noise_text}). The tasks may be too hard or the learning "
        "rate too small: look at the episodes, then try easier tasks, a larger learner.lr or larger groups",
    )


def entropy_trend(seen: Evidence) -> Finding | None:
    """The entropy has collapsed, or has run away."""
    trend = trends.of_steps(seen.first, seen.newest, "entropy")
    if trend is None or len(seen.newest) < FEWEST_STEPS:
        return None
    moved = f"from {trend.first:.2g} to {trend.last:.2g} nats a token"
    if trend.first >= LEAST_ENTROPY and trend.last < ENTROPY_FALL * trend.first:
        return Finding(
            "entropy",
            f"the entropy of the policy fell {moved}: it samples nearly the same tokens each time, so that it learns "
            "little more. If the reward is not good yet: raise clip_high of the loss, or set algorithm.entropy_weight",
        )
    if trend.last > max(ENTROPY_RISE * trend.first, trend.first + ENTROPY_RISE_BY):
        return Finding(
            "entropy",
            f"the entropy of the policy rose {moved}: its answers become random. Lower learner.lr, or set "
            "algorithm.entropy_weight=0 if it is not 0",
        )
    return None


def rounded_adapters(seen: Evidence) -> Finding | None:
    """Rounding undoes most of what the adapters have learned, before the weights are published."""
    rows = list(seen.newest[-LONG_WINDOW:])
    kept = values_of(rows, "weights/adapters_kept")
    if len(kept) < LONG_WINDOW or max(kept) >= LEAST_KEPT:
        return None
    return Finding(
        "rounded",
        f"engines got only {fmean(kept):.0%} of what the adapters learned in {steps_text(rows)} "
        "(weights/adapters_kept): their changes are so small that rounding the merged weights to model.dtype undoes "
        "the rest. Raise learner.lr: 1e-5 to 1e-3 are usual for adapters",
    )


def unread_scores(seen: Evidence) -> Finding | None:
    """The episodes have scores that change nothing."""
    found = [name for name in seen.unread if name in seen.scores]
    if not found:
        return None
    kinds = {"environment": "rewards of tools, environments or simulated users"}
    said = (f"{kinds.get(name, f'the score {name}')} ({seen.scores[name]:.3g} on average)" for name in found)
    advice = "; ".join(seen.unread[name] for name in found)
    return Finding("unread", f"nothing trains on {', nor on '.join(said)}. To change this: {advice}")


RULES: tuple[Rule, ...] = (
    refusing_filter,
    learns_nothing,
    equal_groups,
    skipped_updates,
    failing_episodes,
    biased_selection,
    truncated_episodes,
    malformed_calls,
    worse_held_out,
    reward_trend,
    entropy_trend,
    runaway_kl,
    faded_weights,
    rounded_adapters,
    unread_scores,
)
