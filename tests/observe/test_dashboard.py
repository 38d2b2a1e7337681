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
    for step, reason in enumerate(["", "the last 40 episodes failed; newest failure: t1.0.0: [/tool] is away", ""]):
        replay.log(step, {"failing": reason})
        dashboard = Dashboard(config, tmp_path, dict)
        assert dict(dashboard.rows()).get("failing", "") == reason
        dashboard.update()
        assert reason in capsys.readouterr().err


def test_failures_a_second_and_the_newest_failure_are_shown_while_some_fail(tmp_path: Path) -> None:
    now, replay = [0.0], JsonLines(tmp_path / "metrics" / "replay.jsonl")
    replay.log(0, {"failures": 900, "failing": "", "newest_failure": "t1.0.0: an earlier one"})
    dashboard = Dashboard(TrainConfig(), tmp_path, dict, clock=lambda: now[0])

    def shown() -> dict[str, str]:
        now[0] += 10.0
        return {name: text for name, text in dashboard.rows() if name in ("failed/s", "newest failure", "failing")}

    assert shown() == {}
    replay.log(0, {"failures": 950, "newest_failure": "t2.0.0: KeyError"})
    assert shown() == {"failed/s": "5", "newest failure": "t2.0.0: KeyError"}
    replay.log(0, {"failures": 951, "failing": "the last 40 episodes failed"})
    assert shown() == {"failed/s": "2.55", "failing": "the last 40 episodes failed"}
    shown(), shown()
    assert shown() == {"failing": "the last 40 episodes failed"}
