"""The progress of a run, and the time that is left."""

from __future__ import annotations

import pytest

from asyncrl.runs.pace import PACE_STEPS, StepPace, pace


def test_the_time_left_follows_the_newest_steps() -> None:
    slow = [{"step": step, "seconds/step": 100.0} for step in range(5)]
    fast = [{"step": step, "seconds/step": 2.0} for step in range(5, 5 + PACE_STEPS)]
    found = pace([*slow, *fast], 50)
    assert (found.done, found.left_s) == (25, 50.0)
    assert found.share == pytest.approx(0.5)


def test_a_run_without_a_step_or_without_a_plan_has_no_time_left() -> None:
    assert pace([], 10) == StepPace(0, 10, None)
    assert pace([], 10).left_s is None
    assert pace([{"step": 3, "seconds/step": 2.0}], None).left_s is None
    assert pace([{"step": 3}], 10).left_s is None, "an earlier asyncrl may have written no time"


def test_a_run_that_is_done_has_no_time_left() -> None:
    done = pace([{"step": 9, "seconds/step": 2.0}], 10)
    assert (done.left_s, done.share) == (0.0, 1.0)
