"""What the dashboard of a run shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.observe.dashboard import Dashboard
from asyncrl.observe.sinks import JsonLines


def test_the_newest_values_of_every_role_are_shown(tmp_path: Path) -> None:
    learner, actor = (JsonLines(tmp_path / "metrics" / f"{name}.jsonl") for name in ("learner", "actor-0"))
    dashboard = Dashboard(TrainConfig(), tmp_path, lambda: {"replay": 1})
    assert dict(dashboard.rows())["step"] == "0/100"
    learner.log(8, {"reward/mean": 0.5, "lag/max": 2.0})
    learner.log(9, {"reward/mean": 0.25, "idle": 0.5, "lag/max": 1.0})
    actor.log(1, {"tokens_per_s": 1234.0, "idle": 0.1})
    # An evaluation of an earlier step may end later.
    learner.log(6, {"eval/accuracy": 0.9})
    rows = dict(dashboard.rows())
    assert (rows["step"], rows["reward"], rows["learner idle"]) == ("9/100", "0.25", "50%")
    assert (rows["held-out accuracy"], rows["lag"], rows["restarts"]) == ("0.9", "1", "1")
    assert (rows["rollout tok/s"], rows["rollout idle"]) == ("1234", "10%")


def test_why_everything_fails_is_shown_as_long_as_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, replay = TrainConfig(), JsonLines(tmp_path / "metrics" / "replay-1.jsonl")
    config.replay.shards = 2
    for step, reason in enumerate(["", "the last 40 episodes failed; newest reason: [/tool] is away", ""]):
        replay.log(step, {"failing": reason})
        dashboard = Dashboard(config, tmp_path, dict)
        assert dict(dashboard.rows()).get("failing", "") == reason
        dashboard.update()
        assert reason in capsys.readouterr().err
