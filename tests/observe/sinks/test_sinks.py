"""Metrics reach every sink, survive a restart, and neither failures nor waits of a sink reach the role."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import ObserveConfig, RunConfig, TrainConfig
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.observe.from_config import source_of
from asyncrl.observe.metrics import TRAINED_EPISODES, Fanout, Histogram, Sink, Value
from asyncrl.observe.sinks import JsonLines, open_metrics
from asyncrl.observe.sinks.background import Background
from asyncrl.observe.sinks.opening import SERVICES
from asyncrl.observe.sinks.source import Source
from asyncrl.runs.lines import read_lines
from tests.helpers import until


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


@pytest.mark.parametrize("role", ["actor-0", "replay", "scorer-0"])
def test_a_role_writes_each_row_once(tmp_path: Path, role: str) -> None:
    config = TrainConfig(run=RunConfig(dir=str(tmp_path), name="run"))
    sink = open_metrics(source_of(config, role), config.observe)
    sink.log(0, {"seconds": 1.0})
    sink.close()
    assert len(read_lines(tmp_path / "run" / "metrics" / f"{role}.jsonl")) == 1


def test_services_are_not_told_the_secrets_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Source] = []

    def open_service(source: Source) -> Sink:
        told.append(source)
        return Sink()

    monkeypatch.setitem(SERVICES, "wandb", open_service)
    config = TrainConfig(run=RunConfig(dir=str(tmp_path), name="run"), observe=ObserveConfig(sinks=["wandb"]))
    config.engine.server.environment = {"OPENAI_API_KEY": "s3cr3t"}
    open_metrics(source_of(config, "actor-0"), config.observe).close()
    assert "s3cr3t" not in repr(told[0].config)
    assert "OPENAI_API_KEY" in repr(told[0].config)


@pytest.mark.parametrize(
    ("sink", "package"),
    [
        ("wandb", "wandb"),
        ("tensorboard", "tensorboard"),
        ("trackio", "trackio"),
        ("prometheus", "prometheus_client"),
    ],
)
def test_a_sink_without_its_extra_is_refused_naming_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = TrainConfig(run=RunConfig(dir=str(tmp_path)), observe=ObserveConfig(sinks=[sink]))
    with pytest.raises(ConfigError, match=rf"asyncrl\[{sink}\]"):
        open_metrics(source_of(config, "learner"), config.observe)


class Broken(Sink):
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


class Hanging(Sink):
    """A sink whose network hangs until it is released."""

    def __init__(self) -> None:
        self.begun, self.released, self.abandoned = threading.Event(), threading.Event(), threading.Event()
        self.calls: list[object] = []

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self.begun.set()
        self.released.wait()
        self.calls.append(step)

    def episodes(self, step: int, episodes: object, table: str = TRAINED_EPISODES) -> None:
        self.calls.append(episodes)

    def model(self, step: int, folder: Path) -> None:
        self.calls.append(folder)

    def close(self) -> None:
        self.calls.append("close")

    def abandon(self) -> None:
        self.abandoned.set()


def test_a_sink_that_hangs_holds_up_nobody_and_what_it_misses_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    hanging, other = Hanging(), Broken()
    other.works = True
    sinks = Fanout([Background(hanging, limit=2, close_s=0.01), other])
    sinks.log(0, {})
    hanging.begun.wait()
    for step in range(1, 6):
        sinks.log(step, {})
    assert sinks.lost == 3, "one is in the sink, and two wait"
    assert other.rows[-1] == {"step": 5, "metrics/lost": 2.0}
    sinks.close()
    assert hanging.abandoned.is_set()
    assert sinks.lost == 3 + 3 + 1, "the call that hangs, those that waited, and the other sink's close"
    assert caplog.text.count("Hanging is slow") == caplog.text.count("Hanging hangs") == 1
    hanging.released.set()


def test_a_slow_sink_gets_all_in_order_and_the_end_waits_for_it(tmp_path: Path) -> None:
    slow = Hanging()
    sink = Background(slow, close_s=0.0, upload_s=60.0)
    sink.log(0, {})
    sink.episodes(1, [])
    sink.model(2, tmp_path)
    closing = threading.Thread(target=sink.close)
    closing.start()
    slow.released.set()
    closing.join()
    sink.close()
    assert slow.calls == [0, [], tmp_path, "close"]
    assert sink.lost == 0


def test_failures_in_the_background_are_counted() -> None:
    sink = Background(Broken())
    for step in range(2):
        sink.log(step, {})
    until(lambda: sink.lost == 2)
    sink.close()
    assert sink.lost == 3


def test_bins_that_do_not_fit_their_counts_are_refused() -> None:
    Histogram((1.0, 2.0), (0.0, 1.0, 2.0))
    for edges in ((0.0, 1.0), (0.0, 2.0, 1.0)):
        with pytest.raises(InvariantError, match="bins"):
            Histogram((1.0, 2.0), edges)


def test_a_value_that_no_sink_can_take_loses_no_other_of_its_row_and_is_counted(tmp_path: Path) -> None:
    sink = Fanout([JsonLines(tmp_path / "a.jsonl", lambda: 7.0)])
    hostile: dict[str, Any] = {
        "huge": 10**400,
        "none": None,
        "scalar": np.float32(2.5),
        "whole": np.int64(3),
        "loss": 1.0,
    }
    sink.log(0, hostile)
    row = {"step": 0, "time": 7.0, "scalar": 2.5, "whole": 3.0, "loss": 1.0, "metrics/lost": 2.0}
    assert read_lines(tmp_path / "a.jsonl") == [row]


def test_a_service_that_tries_to_end_the_process_loses_that_call_alone() -> None:
    made: list[int] = []

    class Exits(Sink):
        def log(self, step: int, values: Mapping[str, Value]) -> None:
            if step == 0:
                sys.exit(3)
            made.append(step)

    sink = Background(Exits())
    for step in range(3):
        sink.log(step, {})
    sink.close()
    assert (made, sink.lost) == ([1, 2], 1)


def test_services_that_hang_are_waited_for_together() -> None:
    ended: list[str] = []

    class Ends(Sink):
        def end(self) -> None:
            ended.append("end")

        def close(self) -> None:
            ended.append("close")

    Fanout([Ends(), Ends()]).close()
    assert ended == ["end", "end", "close", "close"]
