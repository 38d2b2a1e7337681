"""Every role is killed once in mid-run: the policy is learned all the same, and every promise holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.end_to_end.support import Run

Start = Callable[..., Run]


@pytest.mark.long
def test_killing_every_role_once_loses_nothing_and_accuracy_is_reached(start: Start, prepared: list[str]) -> None:
    run = start("demo", "learner.steps=24", "learner.eval_every=12", "learner.checkpoint_every=3")
    for step, role in ((2, "actor-0"), (4, "replay"), (6, "scoring-0"), (8, "learner")):
        run.wait_for_step(step)
        run.kill(role)
    summary = run.finish()
    assert (summary["lost"], summary["trained_twice"]) == (0, 0), run.logs()
    assert summary["max_lag_seen"] <= 2
    assert summary["accuracy_before"] < 0.6
    assert summary["accuracy_after"] >= 0.9
    assert summary["trajectories_trained"] == summary["steps"] * 64
