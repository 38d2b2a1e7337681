"""Changes of the configuration in mid-run are marks in the figures, and values with their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.changes import ConfigChange, with_steps
from asyncrl.dashboard.overview import Overviews, changes_of
from asyncrl.dashboard.stores import ReplayStores
from asyncrl.runs.report.compare import comparison_page
from asyncrl.runs.report.comparison import compare
from asyncrl.runs.report.page import run_page
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.run import Run
from asyncrl.runs.summary import summarise
from asyncrl.runs.summary_text import summary_rows
from tests.runs.support import write_changes, write_run

LOWERED = ConfigChange(4, "learner.lr", 0.5, 0.25, 1000)
AGAIN = ConfigChange(6, "learner.lr", 0.25, 0.125, 2000)
TEXT = "0.5, then 0.25 from step 4, then 0.125 from step 6"


def changed_run(folder: Path) -> Path:
    run = write_run(folder, [0.1] * 8, {"learner.lr": 0.125})
    write_changes(run, LOWERED, AGAIN)
    return run


def test_a_value_that_changed_is_shown_with_its_steps() -> None:
    assert with_steps("learner.lr", "0.125", [LOWERED, AGAIN]) == TEXT
    assert with_steps("learner.steps", "8", [LOWERED, AGAIN]) == "8"


@pytest.mark.slow
def test_a_report_lists_the_changes_and_marks_them_in_each_plot_by_step(tmp_path: Path) -> None:
    run = read_run(str(changed_run(tmp_path / "run")))
    assert run.marks() == [
        (4, "from step 4: learner.lr 0.5 -> 0.25"),
        (6, "from step 6: learner.lr 0.25 -> 0.125"),
    ]
    shown = run_page(run)
    assert f"<code>{TEXT}</code>" in shown
    assert "<li>from step 4: learner.lr 0.5 -&gt; 0.25</li>" in shown
    assert "<title>from step 4: learner.lr 0.5 -&gt; 0.25</title>" in shown
    assert "Changes in mid-run" not in run_page(read_run(str(write_run(tmp_path / "plain", [0.1]))))


@pytest.mark.slow
def test_a_comparison_tells_a_changed_run_from_one_that_began_with_its_last_values(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", [0.1] * 8, {"learner.lr": 0.125})
    found = compare([read_run(str(run)) for run in (plain, changed_run(tmp_path / "changed"))])
    assert found.configuration == {"learner.lr": [0.125, TEXT]}
    assert found.configurations == [0, 1]
    assert "<title>changed from step 4: learner.lr 0.5 -&gt; 0.25</title>" in comparison_page(found)


@pytest.mark.slow
def test_the_summary_has_a_row_for_each_change(tmp_path: Path) -> None:
    summary = summarise(Run(changed_run(tmp_path / "run")), 8, "done", "", "")
    assert summary.changes == ["learner.lr 0.5 -> 0.25 from step 4", "learner.lr 0.25 -> 0.125 from step 6"]
    assert ("changed", "learner.lr 0.5 -> 0.25 from step 4") in summary_rows(summary)


@pytest.mark.slow
def test_the_page_gets_the_changes_and_the_value_with_its_steps(tmp_path: Path) -> None:
    run, stores = Run(changed_run(tmp_path / "run")), ReplayStores()
    assert changes_of(run, stores)[0] == {"step": 4, "key": "learner.lr", "old": "0.5", "new": "0.25"}
    assert Overviews(stores).of(run)["configuration"]["learner.lr"] == TEXT
    assert changes_of(Run(write_run(tmp_path / "plain", [0.1])), stores) == []
