"""The lists of runs that the page's server answers with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.support import make_run, table, values
from tests.runs.support import write_run
from tests.runs.test_table import fine_tuning


def test_runs_and_fine_tunings_have_their_kinds(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "rl", [0.5]), fine_tuning(tmp_path / "sft", [1.0])]
    assert [run["kind"] for run in values(folders, "/api/runs")] == ["rl", "sft"]
    assert [row["kind"] for row in table(folders)["rows"]] == ["rl", "sft"]


def test_the_table_has_the_results_and_the_exact_time_of_each_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [0.5], start=1795890992.0)
    one, two = table([folder, write_run(tmp_path / "two", [0.5], {"learner.lr": 0.5})])["rows"]
    assert (one["key"], one["name"], one["folder"], one["changed"]) == ("one", "one", str(folder), 1795890994.0)
    assert two["differs"] == {"learner.lr": "0.5"}


def test_a_run_without_a_configuration_has_a_row(tmp_path: Path) -> None:
    row = table([make_run(tmp_path / "one")])["rows"][0]
    assert (row["step"], row["steps"], row["configuration"]) == (5, None, {})


@pytest.mark.slow
def test_the_overview_of_a_fine_tuning_has_no_problem_and_only_its_own_choices(tmp_path: Path) -> None:
    found = values([fine_tuning(tmp_path / "sft", [1.0])], "/api/runs/sft/overview")
    assert (found["problems"], found["warnings"], found["waits_text"]) == ([], [], "")
    assert list(found["configuration"]) == ["model.path", "learner.lr", "learner.batch_size"]
