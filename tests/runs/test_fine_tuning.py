"""A run of `asyncrl sft` is shown and summarised as a training is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.commands import runnable
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.fine_tuning import FineTuningTable, write_fine_tuning_summary
from asyncrl.runs.live_rows import LINE_S
from asyncrl.runs.run import Run


def write_steps(folder: Path, losses: list[float]) -> None:
    learner, evaluation = (JsonLines(metrics_file(folder, name)) for name in ("learner", "evaluation"))
    for step, loss in enumerate(losses):
        row = {"loss": loss, "sft/epoch": (step + 1) / 4, "lr": 1e-3, "tokens": 80.0, "tokens_per_s": 41.0}
        learner.log(step, {**row, "seconds/step": 2.0})
    for step, loss in ((0, 5.0), (len(losses), 0.5)):
        evaluation.log(step, {"eval/loss": loss, "eval/tokens": 10.0})


def test_its_console_has_the_step_the_loss_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    table = FineTuningTable(Run(tmp_path), 100, dict, lambda: now[0])
    table.update()
    assert "step 0/100  loss -" in capsys.readouterr().err
    write_steps(tmp_path, [4.0, 2.0])
    now[0] += LINE_S
    table.update()
    line = capsys.readouterr().err
    for part in ("elapsed 10 s", "step 2/100", "left 3 min", "loss 2", "held-out loss 0.5", "trained tokens/s 41"):
        assert part in line
    assert len(line) < 200


def test_it_ends_with_a_summary(tmp_path: Path) -> None:
    write_steps(tmp_path, [4.0, 3.0, *[2.0] * 4, 1.0, 0.5])
    (tmp_path / "model").mkdir()
    text = write_fine_tuning_summary(Run(tmp_path), 8, "done", "")
    for line in (
        "result             done after 8 of 8 steps",
        "loss               3.5 -> 0.75 (first and last 2 steps)",
        "held-out loss      5 -> 0.5 (first and last)",
        "epochs             2",
        "speed              40 trained tokens/s",
        f"model              {tmp_path / 'model'}",
        f"next               {runnable()} train model.path={tmp_path / 'model'} run.name=NAME data.train=FILE",
    ):
        assert f"  {line}\n" in text
    assert Run(tmp_path).end() == "done"


def test_one_without_an_exported_model_says_how_to_export_it(tmp_path: Path) -> None:
    write_steps(tmp_path, [4.0, 3.0])
    text = write_fine_tuning_summary(Run(tmp_path), 2, "done", "")
    assert f"  next               {runnable()} export {tmp_path}\n" in text


def test_a_stopped_one_says_how_it_goes_on(tmp_path: Path) -> None:
    write_steps(tmp_path, [4.0, 3.0])
    text = write_fine_tuning_summary(Run(tmp_path), 8, "stopped", "")
    assert "stopped after 2 of 8 steps, 0 of them in the newest checkpoint; the same command resumes it" in text
    assert f"asyncrl sft experiment={tmp_path}/config.yaml" in text


def test_one_that_never_trained_has_no_loss(tmp_path: Path) -> None:
    text = write_fine_tuning_summary(Run(tmp_path), 8, "failed", "learner cannot run")
    assert "failed after 0 of 8 steps" in text
    assert "loss  " not in text
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == "learner cannot run"
