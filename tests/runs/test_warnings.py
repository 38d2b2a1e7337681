"""When a run is warned of that it learns nothing."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.runs.warnings import learning_warnings


def row(step: int, low: float, high: float, **changes: float) -> dict[str, Any]:
    values = {"reward/mean": (low + high) / 2, "reward/min": low, "reward/max": high, "grad_norm": 0.5}
    return {"step": step, **values, "groups/zero_variance": 0.5, "updates_skipped": 0, **changes}


EMPTY = {"grad_norm": 0.0}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], {}),
        ([row(0, 0, 1), row(1, 0, 0, **EMPTY), row(2, 0, 0, **EMPTY)], {}),
        ([row(4, 0, 0, **EMPTY)], {"reward": "every reward of step 4 was 0"}),
        ([row(step, 1, 1, **EMPTY) for step in range(9)], {"reward": "every reward of steps 6 to 8 was 1"}),
        ([row(0, 0, 0, **EMPTY), {"step": 1, "steps_skipped": 1}, row(2, 0, 1)], {}),
        (
            [row(step, 0, 1, **EMPTY, **{"groups/zero_variance": 1.0}) for step in range(3)],
            {"empty": "steps 0 to 2 learned nothing (updates_empty): the rewards within each group were equal"},
        ),
        ([row(step, 0, 1, **EMPTY) for step in range(3)], {"empty": "masked/any"}),
        ([row(0, 0, 1, updates_skipped=2)], {"skipped": "2 updates were left out"}),
    ],
)
def test_a_warning_says_what_is_wrong_in_which_steps_and_what_to_look_at(
    rows: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    found = learning_warnings(rows, "runs/x")
    assert found.keys() == expected.keys()
    for kind, text in expected.items():
        assert text in found[kind]
