"""The sinks to which a process reports are opened once and closed together. Its use of the machine is counted once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.run import RunConfig
from asyncrl.observe.from_config import open_reports
from tests.helpers import until


def config_in(folder: Path) -> TrainConfig:
    return TrainConfig(run=RunConfig(dir=str(folder), name="run"))


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "metrics" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_process_is_counted_once_however_many_files_of_metrics_it_has(tmp_path: Path) -> None:
    with open_reports(config_in(tmp_path), "scoring-0") as reports:
        first, second = reports.metrics("scoring-0-shard-0"), reports.metrics("scoring-0-shard-1")
        step = 0

        def is_measured() -> bool:
            nonlocal step
            step += 1
            first.log(step, {"scorer/labels": 1.0})
            second.log(step, {"scorer/labels": 2.0})
            return "usage/memory_gb" in rows(tmp_path, "scoring-0-shard-0")[-1]

        until(is_measured)
    assert not any("usage/memory_gb" in row for row in rows(tmp_path, "scoring-0-shard-1"))


def test_what_fails_while_it_reports_leaves_everything_written(tmp_path: Path) -> None:
    def report_and_fail() -> None:
        with open_reports(config_in(tmp_path), "actor-0") as reports:
            steps, evaluations = reports.learner_metrics()
            steps.log(1, {"reward/mean": 0.5})
            evaluations.log(1, {"eval/reward": 0.25})
            with reports.spans.span("episode"):
                raise RuntimeError("a fault of the role")

    with pytest.raises(RuntimeError, match="a fault of the role"):
        report_and_fail()
    assert rows(tmp_path, "learner")[-1]["reward/mean"] == 0.5
    assert rows(tmp_path, "evaluation")[-1]["eval/reward"] == 0.25
    assert "episode" in (tmp_path / "run" / "spans" / "actor-0.jsonl").read_text()
