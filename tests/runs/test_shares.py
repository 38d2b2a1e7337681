"""Shares of idle time are those of the rows in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.from_config import settings_of
from asyncrl.runs.lines import newest_rows
from asyncrl.runs.run import Run
from asyncrl.runs.shares import FEWEST_STEPS, growth, idle_shares, totals
from asyncrl.runs.state.advice import advise


def write(run_dir: Path, name: str, rows: list[dict[str, float]], seconds: float = 10.0) -> None:
    """A row every `seconds` from 100 s on, each with its step."""
    times = iter(100.0 + seconds * number for number in range(len(rows)))
    sink = JsonLines(metrics_file(run_dir, name), lambda: next(times))
    for step, row in enumerate(rows):
        sink.log(step, row)
    sink.close()


def test_counters_are_added_over_the_starts_of_a_process() -> None:
    rows = [{"tokens": value} for value in (100.0, 300.0, 20.0, 50.0)]
    assert totals(rows, ["tokens", "absent"]) == {"tokens": 350.0, "absent": 0.0}
    assert growth(rows, ["tokens"]) == {"tokens": 250.0}
    assert growth([], ["tokens"]) == {"tokens": 0.0}


def test_only_the_newest_rows_are_read(tmp_path: Path) -> None:
    path = metrics_file(tmp_path, "learner")
    assert newest_rows(path, 3) == []
    write(tmp_path, "learner", [{"text": "x" * 9000} for _ in range(40)])  # type: ignore[dict-item]
    with path.open("a") as file:
        file.write('{"step": 40, "half a li')
    assert [row["step"] for row in newest_rows(path, 30)] == list(range(10, 40))
    assert [row["step"] for row in newest_rows(path, 3)] == [37, 38, 39]
    assert len(newest_rows(path, 99)) == 40


def test_shares_are_those_of_the_newest_steps(tmp_path: Path) -> None:
    steps = [{"seconds/step": 10.0, "seconds/wait": 4.0, "seconds/publish": 1.0, "idle": 0.4}] * FEWEST_STEPS
    write(tmp_path, "learner", steps[1:])
    assert idle_shares(Run(tmp_path)) is None
    metrics_file(tmp_path, "learner").unlink()
    write(tmp_path, "learner", steps)
    busy = {"servers_without_graphs": 2.0, "servers_queued": 30.0, "scheduler_busy": 0.9}
    write(tmp_path, "actor-0", [{"idle": 0.25, **busy}, {"idle": 0.75, **busy, "servers_queued": 10.0}])
    write(tmp_path, "actor-1", [{"idle": 0.0, "servers_queued": 1.0}])
    counted = {"learner_waited_for_labels_s": 10.0, "depth_pending": 3.0}
    counted |= {"tokens_accepted": 500.0, "tokens_evicted": 50.0, "tokens_masked": 0.0}
    later = {"learner_waited_for_labels_s": 25.0, "depth_pending": 5.0}
    later |= {"tokens_accepted": 1000.0, "tokens_evicted": 120.0, "tokens_masked": 30.0}
    write(tmp_path, "replay", [counted, later])
    seen = idle_shares(Run(tmp_path))
    assert seen is not None
    assert (seen.steps, seen.learner_idle) == (5, 0.4)
    assert seen.waited == {"labels": 0.3, "episodes": 0.0, "store": 0.0, "old_groups": 0.0}
    assert seen.phases == {"wait": 0.4, "publish": 0.1}
    assert (seen.actors, seen.actors_idle) == (2, 0.25)
    assert (seen.scorers, seen.scorers_idle) == (0, None)
    assert (seen.too_old, seen.pending) == (0.2, 4.0)
    assert (seen.without_graphs, seen.queued, seen.scheduler_busy) == (2.0, 21.0, 0.9)


def test_the_waits_of_long_steps_are_those_of_their_whole_time(tmp_path: Path) -> None:
    write(tmp_path, "learner", [{"seconds/step": 1000.0, "idle": 0.5}] * FEWEST_STEPS, seconds=1000.0)
    waits = [{"learner_waited_for_labels_s": 2.5 * number, "depth_pending": 1.0} for number in range(1000)]
    write(tmp_path, "replay", waits, seconds=5.0)
    seen = idle_shares(Run(tmp_path))
    assert seen is not None
    assert seen.waited["labels"] == pytest.approx(0.5, abs=0.01)
    assert seen.pending == 1.0


def test_the_workers_of_a_scorer_for_the_shards_of_the_replay_are_one_scorer(tmp_path: Path) -> None:
    write(tmp_path, "learner", [{"seconds/step": 10.0, "idle": 0.6}] * FEWEST_STEPS)
    for shard in range(4):
        write(tmp_path, f"replay-{shard}", [{"learner_waited_for_labels_s": value} for value in (0.0, 25.0)])
        write(tmp_path, f"scoring-0-shard-{shard}", [{"idle": 0.5}, {"idle": 0.3}])
    seen = idle_shares(Run(tmp_path))
    assert seen is not None
    assert (seen.scorers, seen.scorers_idle) == (1, pytest.approx(0.4**4))
    (advice,) = advise(seen, settings_of(TrainConfig(model=ModelConfig(path="m"))))
    assert advice.endswith("while scorers were busy for 97%: set cluster.scorers=2")
    write(tmp_path, "scoring-1-shard-0", [{"idle": 0.8}])
    seen = idle_shares(Run(tmp_path))
    assert seen is not None
    assert (seen.scorers, seen.scorers_idle) == (2, pytest.approx((0.4**4 + 0.8) / 2))
