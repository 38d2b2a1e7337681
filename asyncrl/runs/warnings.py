"""Warns if the metrics show that a run learns nothing, or learns from a biased sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 3
"""The number of bad steps in a row that gives a warning about a running run."""
FEWEST_EPISODES = 30
MAX_FAILED_SHARE = 0.1


def learning_warnings(rows: Sequence[Mapping[str, Any]], run: str) -> dict[str, str]:
    """Warnings by kind, from the metrics of the last `WINDOW` steps that were trained, or of all if there are fewer.
    Rows of an earlier asyncrl may lack some metrics. `run` is the folder of the run, for the commands in the texts."""
    rows = [row for row in rows if "reward/mean" in row][-WINDOW:]
    if not rows:
        return {}
    steps = f"step {rows[-1]['step']}" if len(rows) == 1 else f"steps {rows[0]['step']} to {rows[-1]['step']}"
    look = f"`asyncrl inspect step {run} {rows[-1]['step']}` shows some of the episodes"
    found = {}
    rewards = {row.get(f"reward/{end}") for row in rows for end in ("min", "max")}
    if len(rewards) == 1 and None not in rewards:
        found["reward"] = (
            f"every reward of {steps} was {next(iter(rewards)):g}, which teaches nothing: {look}. "
            "Check the scoring rule, and whether the task is too hard or too easy for the model"
        )
    elif all(row.get("grad_norm") == 0 for row in rows):
        why = (
            "the rewards within each group were equal (groups/zero_variance). Use a larger learner.group_size, or "
            "tasks that the policy solves sometimes"
            if all(row.get("groups/zero_variance") == 1 for row in rows)
            else "the gradient was 0. masked/any is the share of the tokens that the corrections leave out"
        )
        found["empty"] = f"{steps} learned nothing (updates_empty): {why}"
    if skipped := rows[-1].get("updates_skipped"):
        found["skipped"] = (
            f"{skipped:.0f} updates were left out, since their gradient was not finite (updates_skipped). "
            "Try a smaller learner.lr, or model.dtype=float32"
        )
    return found


def failure_warning(counts: Mapping[str, int], newest: str, run: str) -> str:
    """A warning if so many episodes or scorings have failed that the trained episodes may be a biased sample; else
    empty. `counts` has the replay's counters, `newest` is the reason of the newest failure, and `run` is the run's
    folder.
    """
    episodes, failed = counts["accepted"] + counts["failures"], counts["dead"] + counts["failures"]
    if episodes < FEWEST_EPISODES or failed <= MAX_FAILED_SHARE * episodes:
        return ""
    return (
        f"{failed / episodes:.0%} of the episodes ({failed} of {episodes}) failed or could not be scored. The run "
        f"trains only on the rest, a biased sample{f'; newest failure: {newest}' if newest else ''}. "
        f"`asyncrl inspect dead-letters {run}` lists the failures; actor.max_failure_share can end such a run"
    )
