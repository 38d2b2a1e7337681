"""A few kills of a whole run; `make chaos` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.monkey import chaos

pytestmark = pytest.mark.long


@pytest.mark.timeout(900)
def test_a_run_whose_roles_are_killed_loses_nothing_and_learns_the_same(tmp_path: Path) -> None:
    verdict = chaos(tmp_path, kills=8, seed=0, shards=1)
    assert verdict["broken"] == []
    assert (verdict["lost"], verdict["trained_twice"], verdict["over_bound"]) == (0, 0, 0)
    assert verdict["weights_equal"]
    assert verdict["kills"] == 8
    ended = sum(verdict[fate] for fate in ("trained", "evicted", "filtered", "dropped", "dead", "waiting"))
    assert verdict["acknowledged"] == ended > 0
    assert verdict["trained"] == verdict["steps"] * 8
    assert verdict["filtered"] > 0
