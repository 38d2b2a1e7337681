"""Changes of the configuration are recorded with the first step that has no plan yet, and the age bound may change."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.changes import ConfigChange, values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.stored import StoredRun
from tests.replay.support import Core, make_settings


def values(**changes: Any) -> dict[str, Any]:
    given = {"data.train": ["t.parquet"]}
    return values_of(TrainConfig()) | given | {key.replace("__", "."): value for key, value in changes.items()}


def test_a_change_holds_from_the_first_step_without_a_plan_and_is_recorded_once(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    assert core.configure(values()) == []
    core.run_episodes(8)
    core.planned(0)
    expected = [ConfigChange(1, "learner.lr", 1e-6, 0.5, 0)]
    for _ in range(2):
        assert core.configure(values(learner__lr=0.5)) == expected
        core.restart()
    with pytest.raises(ConfigError, match=r"run\.seed=1: it was 0(.|\n)*learner\.group_size=2: it was 8"):
        core.configure(values(learner__group_size=2, run__seed=1, learner__lr=9.0))
    core.planned(1)
    expected.append(ConfigChange(2, "learner.lr", 0.5, 1e-6, 0))
    assert core.configure(values()) == expected
    core.store.close()
    with closing(StoredRun(tmp_path)) as stored:
        assert stored.changes() == expected


def test_a_smaller_bound_evicts_and_counts_what_is_too_old_and_keeps_the_recorded_plans(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(4, 4)))
    core.run_episodes(16)
    plan = core.planned(0)
    core.publish(1)
    core.restart(make_settings(admission=Admission(0, 4)))
    assert (core.status()["evicted"], core.plan(0)) == (12, plan)
    for step in (1, 2):
        assert len(core.run_episodes(100, version=step)) == 4, "the bound admits one batch of the newest version"
        core.planned(step)
        core.publish(step + 1)
    audit = core.audit()
    assert (audit["lost"], audit["trained_twice"], audit["largest_lag"]) == (0, 0, 0)


def test_a_larger_bound_admits_more_at_once(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(0, 4)))
    assert len(core.tickets(100)) == 4
    core.restart(make_settings(admission=Admission(2, 4)))
    assert len(core.tickets(100, holding=core.holding())) == 8
