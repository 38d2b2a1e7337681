"""Metrics reach every sink, survive a restart, and an absent extra is named."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ModelConfig, ObserveConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import Fanout, Value
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


class Broken:
    """A sink that fails for a while."""

    def __init__(self) -> None:
        self.works = False
        self.rows: list[dict[str, Any]] = []

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if not self.works:
            raise RuntimeError("the service is away")
        self.rows.append({"step": step, **values})

    def close(self) -> None:
        raise OSError("nothing can be closed")


def test_a_sink_that_fails_ends_nothing_is_counted_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, other = Broken(), Broken()
    other.works = True
    sinks = Fanout([broken, other])
    for step in range(3):
        sinks.log(step, {"loss": 0.5})
    broken.works = True
    sinks.log(3, {"loss": 0.5})
    sinks.close()
    assert broken.rows == [{"step": 3, "loss": 0.5, "metrics/lost": 3.0}]
    assert [row["step"] for row in other.rows] == [0, 1, 2, 3]
    assert sinks.lost == 5
    assert caplog.text.count("Broken failed") == 2, "once for each sink"


def test_a_line_that_a_killed_process_left_unfinished_is_not_part_of_the_next(tmp_path: Path) -> None:
    file = tmp_path / "learner.jsonl"
    file.write_text('{"step": 0}\n{"step": 1, "lo')
    sink = JsonLines(file, clock=lambda: 7.0)
    sink.log(1, {})
    sink.close()
    assert read_lines(file) == [{"step": 0}, {"step": 1, "time": 7.0}]
