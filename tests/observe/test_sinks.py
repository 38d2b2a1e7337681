"""Metrics reach every sink, survive a restart, and an absent extra is named."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ObserveConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import Fanout, Value
from asyncrl.observe.sinks import JsonLines, open_metrics, read_lines


def test_lines_are_appended_over_restarts_and_half_written_ones_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "learner.jsonl"
    expected = []
    for step in range(2):
        sink = JsonLines(file, clock=lambda: 7.0)
        sink.log(step, {"loss": 0.5, "reason": "none"})
        sink.close()
        expected.append({"step": step, "time": 7.0, "loss": 0.5, "reason": "none"})
        with file.open("a") as killed:
            killed.write('{"step": 9, "lo')
        assert read_lines(file) == expected


def test_wandb_without_its_extra_is_refused_naming_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"asyncrl\[wandb\]"):
        open_metrics(ObserveConfig(wandb=True), tmp_path, "learner")


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
