"""The results in an evaluation's store: pass@k is as counted by hand, and failures count nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.commands.evaluate.progress import progress_line
from asyncrl.commands.evaluate.results import EvaluationResult, read_result, shown_result
from asyncrl.commands.from_python import EvaluationView
from asyncrl.replay.protocol import FailEpisode
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.run import Run
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings
from tests.runs.inspect.support import printed

SOURCES = ["easy", "hard", "easy"]
OUTCOMES = {0: [1.0, 0.5, 0.0, 1.0], 1: [0.0, 0.0, 0.25], 2: []}
"""The outcomes of the attempts by held-out task; attempts that are not listed fail."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The store of a complete evaluation of four attempts at three tasks."""
    settings = make_settings(eval_attempts=4, admission=Admission(1, 0), max_attempts=2)
    core = Core(tmp_path / "replay", settings)
    core.evaluate(0)
    left = {row: list(outcomes) for row, outcomes in OUTCOMES.items()}
    while tickets := core.tickets(100):
        for ticket in tickets:
            outcomes = left[int(ticket.task.id.removeprefix("task-10"))]
            if outcomes:
                core.put(make_trajectory(ticket))
                core.label_all(outcomes.pop(0))
            else:
                core.ask(FailEpisode(ticket.id, "the tool is away"))
    core.store.close()
    return tmp_path / "replay"


@pytest.fixture
def stored(folder: Path) -> Iterator[StoredRun]:
    with closing(StoredRun(folder)) as stored:
        yield stored


def measured(stored: StoredRun, threshold: float) -> EvaluationResult:
    return read_result(stored, SOURCES, 4, threshold)


def test_a_failed_attempt_is_counted_with_its_reason_and_is_in_no_mean_and_no_estimate(stored: StoredRun) -> None:
    result = measured(stored, 1.0)
    assert result.failures == {"the tool is away": 5}
    total, easy, hard = result.total, result.sources["easy"], result.sources["hard"]
    assert (total.tasks, total.scored, total.failed) == (3, 7, 5)
    assert total.mean_outcome == pytest.approx(fmean([1.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.25]))
    assert easy.pass_at == {1: 0.5, 2: pytest.approx(5 / 6), 4: 1.0}
    assert easy.pass_tasks == {1: 1, 2: 1, 4: 1}, "the task without a scored attempt has no part"
    assert hard.pass_at == {1: 0.0, 2: 0.0, 4: None}
    assert total.pass_at == {1: 0.25, 2: pytest.approx(5 / 12), 4: 1.0}


def test_a_lower_threshold_makes_graded_outcomes_right(stored: StoredRun) -> None:
    assert measured(stored, 0.25).total.pass_at[1] == pytest.approx((3 / 4 + 1 / 3) / 2)


def test_the_table_and_the_progress_name_failures(folder: Path, stored: StoredRun) -> None:
    shown = printed(shown_result(measured(stored, 1.0)))
    assert "5 x the tool is away" in shown
    assert "pass@1 on 2, pass@2 on 2, pass@4 on 1 of 3 tasks" in shown
    rows = [row.split() for row in shown.splitlines()]
    assert ["hard", "1", "3", "1", "0.083", "0.000", "0.083", "-", "4.0"] in rows
    assert ["hard", "pass@k", "0.000", "0.000", "-"] in rows
    assert ["hard", "best@k", "0.083", "0.167", "-"] in rows
    assert ["hard", "maj@k", "-", "-", "-"] in rows, "nobody votes in this store"
    stored.close()
    done, total, line = progress_line(Run(folder.parent))
    assert (done, total) == (12, 12)
    assert "12/12 attempts" in line
    assert "the tool is away" in line


def test_the_table_from_python_has_a_row_for_each_source_and_one_for_all(stored: StoredRun, folder: Path) -> None:
    result = measured(stored, 1.0)
    view = EvaluationView(folder, result)
    rows = {row["source"]: row for row in view.table().to_pylist()}
    assert list(rows) == ["easy", "hard", "all"]
    assert rows["easy"]["pass@2"] == result.sources["easy"].pass_at[2]
    assert [rows["all"][name] for name in ("tasks", "scored", "failed", "process")] == [3, 7, 5, None]
    assert repr(view) == f"Evaluation({str(folder)!r}: 3 tasks, accuracy {result.total.accuracy:.3f})"
