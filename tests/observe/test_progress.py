"""What the progress of a run shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig, TrainConfig
from asyncrl.observe.progress import Progress


def test_the_step_is_the_newest_though_an_evaluation_of_an_earlier_one_ends_later(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    lines = [
        {"step": 8, "reward/mean": 0.5, "lag/max": 2.0},
        {"step": 9, "reward/mean": 0.75, "lag/max": 1.0},
        {"step": 6, "eval/accuracy": 0.9},
    ]
    (metrics / "learner.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = TrainConfig(run=RunConfig())
    config.learner.steps = 20
    rows = dict(Progress(config, tmp_path, lambda: {"actor-0": 1}).rows())
    assert (rows["step"], rows["reward"], rows["held-out accuracy"], rows["lag"]) == ("9/20", "0.75", "0.9", "1")
    assert rows["restarts"] == "1"


def test_why_everything_fails_is_shown_as_long_as_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    config = TrainConfig(run=RunConfig())
    config.replay.shards = 2
    for number, reason in enumerate(["", "the last 40 episodes failed; newest reason: [/tool] is away", ""]):
        with (metrics / "replay-1.jsonl").open("a") as file:
            file.write(json.dumps({"step": number, "failing": reason}) + "\n")
        progress = Progress(config, tmp_path, dict)
        assert dict(progress.rows()).get("failing", "") == reason
        progress.update()
        assert reason in capsys.readouterr().err
