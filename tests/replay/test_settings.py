"""The settings that a replay takes from the configuration of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.schema import DataConfig, ModelConfig, TrainConfig
from asyncrl.data.writing import write_tasks
from asyncrl.replay.from_config import replay_settings
from tests.helpers import make_task


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("history", "sampled", 100),
        ("history", "template", 300),
        ("agent_sessions", True, 300),
    ],
)
def test_a_trajectory_may_have_as_many_tokens_as_its_actor_allows_for_all_sequences_of_an_episode(
    tmp_path: Path, option: str, value: object, allowed: int
) -> None:
    write_tasks(tmp_path / "tasks.parquet", [make_task(index) for index in range(5)])
    config = TrainConfig(
        model=ModelConfig(path=str(tmp_path)), data=DataConfig(train=[str(tmp_path / "tasks.parquet")])
    )
    config.learner.batch_size, config.learner.group_size = 4, 2
    config.actor.max_tokens, config.actor.max_total_tokens = 100, 300
    setattr(config.actor, option, value)
    assert replay_settings(config).max_tokens == allowed
