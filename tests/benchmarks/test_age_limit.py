"""The bound on the length of a step, on a group whose ages can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.age_limit import Groups

# One group of two members: one plays for 10 s without a pause, the other from second 0 to 2 and from second 4 to 6.
GROUPS = Groups(np.array([0.0, 0.0, 4.0]), np.array([10.0, 2.0, 6.0]), np.array([100.0, 20.0, 20.0]), np.full(3, 10.0))


@pytest.mark.parametrize(
    ("step_s", "max_lag", "too_old"),
    [
        # The group is trained at second 10, and what was sampled in the last 4 s is young enough.
        (2.0, 1, 60 + 20 + 20),
        # In the last 6 s.
        (3.0, 1, 40 + 20),
        # In the last 8 s.
        (2.0, 3, 20 + 20),
        (6.0, 1, 0),
    ],
)
def test_tokens_are_too_old_if_more_versions_than_the_bound_were_published_since(
    step_s: float, max_lag: int, too_old: float
) -> None:
    assert GROUPS.too_old(step_s, max_lag) == pytest.approx(too_old / 140)


def test_the_shortest_step_leaves_at_most_the_share_too_old_and_a_shorter_one_does_not() -> None:
    found = GROUPS.shortest_step(1, 0.0)
    assert found == 5.0
    assert GROUPS.too_old(4.95, 1) > 0
    assert GROUPS.shortest_step(1, 1.0) == 0.5
