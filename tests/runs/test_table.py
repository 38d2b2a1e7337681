from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.locations import FINE_TUNING_FILE
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.run import Run
from asyncrl.runs.table import RunLine, RunTable, differences
from tests.runs.support import write_run

LONG_S = 1e9


def look(*folders: Path) -> Mapping[str, RunLine]:
    lines, complete = RunTable({folder.name: Run(folder) for folder in folders}).look(LONG_S)
    assert complete
    return lines


def fine_tuning(folder: Path, losses: list[float], values: dict[str, Any] | None = None) -> Path:
    write_run(folder, [], values)
    (folder / FINE_TUNING_FILE).write_text("yes\n")
    metrics_file(folder, "evaluation").unlink()
    sink = JsonLines(metrics_file(folder, "learner"))
    for step, loss in enumerate(losses):
        sink.log(step, {"sft/loss": loss, "loss": loss})
    sink.close()
    return folder


def test_a_run_has_its_progress_results_and_main_choices(tmp_path: Path) -> None:
    line = look(write_run(tmp_path / "one", [0.25] * 4 + [0.75] * 4, {"learner.lr": 3e-5}))["one"]
    assert (line.state, line.step, line.steps, line.is_fine_tuning) == ("stopped", 8, 8, False)
    assert line.results == {"reward": (0.25, 0.75), "accuracy": (0.25, 0.75), "outcome": (0.25, 0.75)}
    assert line.configuration["learner.lr"] == "3e-05"
    assert line.configuration["algorithm.loss.name"] == "ppo"
    assert line.changed == 116.0


def test_a_fine_tuning_has_losses_and_is_compared_only_with_fine_tunings(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "rl", [0.5]), fine_tuning(tmp_path / "sft", [2.0, 1.0, 0.5], {"run.seed": 3})]
    lines = look(*runs)
    assert lines["sft"].is_fine_tuning
    assert lines["sft"].results == {"loss": (2.0, 0.5)}
    assert [line.differs for line in lines.values()] == [{}, {}]


def test_the_value_that_most_runs_have_is_left_out_of_them(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"seed-{seed}", [0.5], {"run.seed": seed}) for seed in (1, 2)]
    folders += [write_run(tmp_path / "other", [0.5], {"run.seed": 1, "learner.lr": 0.5, "network.keys": "folder"})]
    assert {name: line.differs for name, line in look(*folders).items()} == {
        "seed-1": {},
        "seed-2": {"run.seed": "2"},
        "other": {"learner.lr": "0.5"},
    }


def test_secrets_and_long_values_are_not_shown_whole() -> None:
    found = differences({"one": {"model.path": "x" * 500, "engine.server.env": {"API_KEY": "a"}}, "two": {"a": 1}})
    assert len(found["one"]["model.path"]) < 100
    assert "a" not in found["one"].get("engine.server.env", "").removeprefix("{API_KEY: ")


def test_a_look_at_many_runs_has_a_limit_begins_with_the_newest_and_the_next_one_continues(tmp_path: Path) -> None:
    runs = {str(number): Run(write_run(tmp_path / str(number), [0.5])) for number in range(4)}
    for number, run in runs.items():
        os.utime(run.config_file, (1000.0 + int(number), 1000.0 + int(number)))
    table = RunTable(runs, clock=count().__next__)
    seen = [table.look(1.0) for _ in range(4)]
    assert list(seen[0][0]) == ["2", "3"]
    assert [(len(lines), complete) for lines, complete in seen] == [(2, False), (4, True), (4, True), (4, True)]


def test_what_changes_is_read_again_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "one", [0.5])
    table = RunTable({"one": Run(folder)})
    first = table.look(LONG_S)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "rows", lambda self, role: pytest.fail("an unchanged file is read again"))
        assert table.look(LONG_S) == first
    sink = JsonLines(metrics_file(folder, "learner"), lambda: 200.0)
    sink.log(1, {"reward/mean": 1.5})
    sink.close()
    (folder / "supervised").write_text('{"host": "another", "pid": 7}')
    line = table.look(LONG_S)[0]["one"]
    assert (line.step, line.results["reward"], line.changed, line.state) == (2, (0.5, 1.5), 200.0, "running")


@pytest.mark.parametrize("value", ["NaN", "1e999", "1" + "0" * 400, "1e308", '"x"', "null", "[1]"])
def test_damaged_rows_and_configurations_leave_the_table(tmp_path: Path, value: str) -> None:
    folder = write_run(tmp_path / "one", [0.5])
    row = f'{{"step": 3, "time": 5.0, "reward/mean": {value}, "eval/loss": {value}}}\n'
    for role in ("learner", "evaluation"):
        metrics_file(folder, role).write_text(row * 20)
    (folder / "config.yaml").write_text("a: [")
    line = look(folder)["one"]
    assert (line.step, line.results, line.configuration) == (4, {}, {})
