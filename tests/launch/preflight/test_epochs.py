"""Epochs become learner steps at the start of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.refusals import refusals
from asyncrl.config.schema import LearnerConfig, ModelConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.data.writing import write_tasks
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight.epochs import count_steps, steps_of
from tests.helpers import make_task


def config_of(tasks: Path, **learner: object) -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path="none"), learner=LearnerConfig(batch_size=6, group_size=2, **learner))
    config.data.train = [str(tasks)]
    return config


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_tasks(tmp_path / "tasks.parquet", [make_task(number) for number in range(10)])
    return tmp_path / "tasks.parquet"


def test_the_start_of_a_run_makes_steps_of_epochs_and_tells_them(tasks: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tasks, epochs=2)
    with caplog.at_level(logging.INFO):
        count_steps(config.learner, config.replay.shards, run_tasks(config))
    assert (config.learner.total_steps, config.learner.epochs) == (7, None)
    assert "learner.epochs=2 of 10 tasks are learner.steps=7, each of 3 groups (rounded up to 2.1 epochs" in caplog.text
    assert refusals(config) == []


@pytest.mark.parametrize(("steps", "counted"), [(None, 100), (0, 0), (5, 5)])
def test_without_epochs_the_steps_are_those_that_are_set_or_a_hundred(
    tasks: Path, steps: int | None, counted: int
) -> None:
    config = config_of(tasks, steps=steps)
    count_steps(config.learner, config.replay.shards, run_tasks(config))
    assert config.learner.steps == config.learner.total_steps == counted


def test_a_role_by_itself_does_not_count_epochs(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="only `asyncrl train` computes the steps from epochs"):
        _ = config_of(tasks, epochs=1).learner.total_steps


@given(
    rows=st.integers(1, 200),
    groups=st.integers(1, 12),
    shards=st.integers(1, 4),
    epochs=st.sampled_from([0.1, 0.5, 1, 3]),
    publish_every=st.integers(1, 3),
)
def test_every_shard_passes_its_tasks_so_often_and_fewer_steps_would_not_do(
    rows: int, groups: int, shards: int, epochs: float, publish_every: int
) -> None:
    shards = min(shards, rows, groups)
    learner = LearnerConfig(batch_size=2 * groups, group_size=2, publish_every=publish_every)
    steps = steps_of(learner, epochs, rows, shards)
    shares = [(len(range(k, rows, shards)), len(range(k, groups, shards))) for k in range(shards)]
    assert steps % publish_every == 0
    assert all(steps * drawn >= epochs * fed - 1e-9 for fed, drawn in shares)
    assert any((steps - publish_every) * drawn < epochs * fed for fed, drawn in shares)


@pytest.mark.parametrize(
    ("section", "name", "value", "keys"),
    [
        ("learner", "steps", 10, "learner.epochs=1 with learner.steps=10"),
        ("data", "weights", {"a": 1.0}, "learner.epochs=1 with data.weights={a: 1.0}"),
        ("data", "band", [0.1, 0.9], "learner.epochs=1 with data.band=[0.1, 0.9]"),
        ("replay", "source", "/tmp", "learner.epochs=1 with replay.source=/tmp"),
    ],
)
def test_epochs_are_refused_where_they_have_no_meaning(
    tasks: Path, section: str, name: str, value: object, keys: str
) -> None:
    config = config_of(tasks, epochs=1)
    setattr(getattr(config, section), name, value)
    assert any(line.startswith(keys) for line in refusals(config))
