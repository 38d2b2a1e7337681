"""Metrics reach every sink, survive a restart, and an absent extra is named."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ModelConfig, ObserveConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.progress import Progress
from asyncrl.observe.sinks import JsonLines, open_metrics, read_lines


def test_lines_are_appended_over_restarts_and_a_half_written_one_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "learner.jsonl"
    for step in range(2):
        sink = JsonLines(file, clock=lambda: 7.0)
        sink.log(step, {"loss": 0.5, "lag": [1.0, 2.0]})
        sink.close()
    with file.open("a") as out:
        out.write('{"step": 2')
    assert read_lines(file) == [{"step": step, "time": 7.0, "loss": 0.5, "lag": [1.0, 2.0]} for step in range(2)]


def test_wandb_without_its_extra_is_refused_naming_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"asyncrl\[wandb\]"):
        open_metrics(ObserveConfig(wandb=True), tmp_path, "learner")


def test_progress_shows_the_newest_values_of_every_role(tmp_path: Path) -> None:
    config = TrainConfig(model=ModelConfig(path="m"))
    learner, actor = (open_metrics(ObserveConfig(console=False), tmp_path, name) for name in ("learner", "actor-0"))
    progress = Progress(config, tmp_path, lambda: {"replay": 1})
    assert dict(progress.rows())["step"] == "0/100"
    learner.log(3, {"reward/mean": 0.25, "idle": 0.5, "lag/max": 1.0})
    actor.log(1, {"tokens_per_s": 1234.0, "idle": 0.1})
    rows = dict(progress.rows())
    assert (rows["step"], rows["reward"], rows["learner idle"]) == ("3/100", "0.25", "50%")
    assert (rows["rollout tok/s"], rows["rollout idle"], rows["restarts"]) == ("1234", "10%", "1")
