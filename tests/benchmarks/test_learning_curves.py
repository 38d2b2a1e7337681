"""benchmarks.learning_curves: the curves of finished runs, by setting and seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import DataError
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.run import Run
from benchmarks.learning_curves import curve, evaluation, line, main, table
from tests.runs.support import write_run


def finished(folder: Path, max_lag: int, seed: int, **values: Any) -> Path:
    return write_run(folder, [0.1, 0.3, 0.5], {"replay.max_lag": max_lag, "run.seed": seed, **values})


def test_a_point_has_the_training_before_its_evaluation(tmp_path: Path) -> None:
    found = curve(Run(finished(tmp_path / "a", 4, 7)))
    assert (found["run"], found["setting"], found["seed"], found["tokens_sampled"]) == ("a", "max_lag 4", 7, 300)
    assert found["points"] == [
        {"step": 0, "samples": 0, "tokens": 0, "seconds": 0, "accuracy": 0.25, "reward": None, "episodes": 64},
        {"step": 3, "samples": 24, "tokens": 240, "seconds": 6.0, "accuracy": 0.75, "reward": 0.3, "episodes": 64},
    ]


def test_a_restarted_actor_goes_on_counting(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", 4, 7)
    JsonLines(metrics_file(folder, "actor-0"), lambda: 200.0).log(9, {"tokens": 50.0})
    assert curve(Run(folder))["tokens_sampled"] == 350


def test_a_run_without_evaluations_is_refused_with_the_fix(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", 4, 7)
    metrics_file(folder, "evaluation").unlink()
    with pytest.raises(DataError, match=r"has 3 steps of RL and 0 evaluations.*learner\.eval_every"):
        curve(Run(folder))


def test_seeds_of_a_setting_share_a_line_at_the_steps_that_most_have(tmp_path: Path) -> None:
    folders = [finished(tmp_path / str(seed), 4, seed) for seed in (0, 1)]
    JsonLines(metrics_file(folders[1], "evaluation"), lambda: 104.0).log(1, {"eval/accuracy": 0.4})
    JsonLines(metrics_file(folders[1], "evaluation"), lambda: 110.0).log(3, {"eval/accuracy": 0.85})
    runs = [curve(Run(folder)) for folder in folders]
    assert [point["step"] for point in runs[1]["points"]] == [0, 1, 3, 3]
    assert list(line(runs, "samples")) == [(0, 0.25, 0.25, 0.25), (24, 0.8, 0.75, 0.85)]
    longer = runs[1] | {"points": [*runs[1]["points"], runs[1]["points"][-1] | {"step": 9, "samples": 72}]}
    assert list(line([runs[0], longer], "samples")) == list(line(runs, "samples"))
    assert list(line([runs[0], longer, longer], "samples"))[-1] == (72, 0.85, 0.85, 0.85)
    slower = runs[0] | {"points": [each | {"samples": each["samples"] * 9} for each in runs[0]["points"]]}
    assert list(line([slower, longer, longer], "samples"))[-1][0] == 88, "x would fall to 72 without the slow run"
    other = curve(Run(finished(tmp_path / "other", 0, 0, **{"cluster.colocated": True})))
    rows = table([*runs, other]).splitlines()
    assert rows[2] == "| max_lag 0, colocated | 0 | 0.250 | 0.750 | 0.750 to 0.750 | 4.0 | 40.0 | 6 |"
    assert rows[3] == "| max_lag 4 | 0, 1 | 0.250 | 0.800 | 0.750 to 0.850 | 4.0 | 40.0 | 6 |"


def test_runs_with_other_learning_rates_are_not_averaged_as_seeds(tmp_path: Path) -> None:
    folders = [finished(tmp_path / str(lr), 4, 0, **{"learner.lr": lr}) for lr in (1e-5, 1e-6)]
    with pytest.raises(
        SystemExit, match=r"no two seeds of max_lag 4: they have learner\.lr 1e-05 and 1e-06; name them"
    ):
        main(["tiny", *map(str, folders), "--out", str(tmp_path)])


@pytest.mark.slow
def test_the_command_writes_the_result_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(finished(tmp_path / f"{lag}-{seed}", lag, seed)) for lag in (0, 4) for seed in (0, 1)]
    total = {
        "tasks": 5,
        "scored": 40,
        "failed": 0,
        "accuracy": 0.5,
        "mean_length": 9.0,
        "pass_at": {"1": 0.5, "8": 0.9},
    }
    evaluated = tmp_path / "evaluation.json"
    evaluated.write_text(json.dumps({"model": "m", "data": "t", "attempts": 8, "temperature": 1.0, "total": total}))
    picture = tmp_path / "curves.png"
    words = ["--evaluations", str(evaluated), "--picture", str(picture), "--out", str(tmp_path)]
    main(["tiny", *folders, *words])
    assert "| max_lag 4 | 0, 1 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "learning-tiny.json").read_text())["result"]
    assert [run["max_lag"] for run in result["runs"]] == [0, 0, 4, 4]
    assert result["evaluations"] == [{"model": "m", "data": "t", "attempts": 8, "temperature": 1.0, **total}]
    assert picture.stat().st_size > 1000


def test_words_that_name_no_run_and_no_evaluation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a run"):
        main(["tiny", str(tmp_path), "--out", str(tmp_path)])
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(DataError, match="name its evaluation"):
        evaluation(tmp_path / "other.json")
    with pytest.raises(DataError, match="No such file"):
        evaluation(tmp_path / "missing.json")
