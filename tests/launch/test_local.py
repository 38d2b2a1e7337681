"""A second run with the same name resumes, or says why not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from asyncrl.config.schema import ClusterConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.local import claim, exclusively, port_overrides, role_commands
from asyncrl.machine.ports import free_ports


def make_config() -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path="m"))
    config.data.train = "t.parquet"
    return config


def test_the_same_configuration_resumes_and_resumable_options_may_change(tmp_path: Path) -> None:
    config = make_config()
    assert not claim(config, tmp_path)
    config.learner.steps += 5
    config.replay.retention = "all"
    config.cluster.actors = 7
    assert claim(config, tmp_path)


def test_another_configuration_is_refused_naming_what_differs(tmp_path: Path) -> None:
    config = make_config()
    claim(config, tmp_path)
    config.learner.lr = 0.5
    config.scoring.rules = {"math": "mine.rule"}
    with pytest.raises(ConfigError, match=r"learner\.lr: 1e-06 then, 0\.5 now(.|\n)*another run\.name"):
        claim(config, tmp_path)


def test_a_run_folder_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    with exclusively(tmp_path), pytest.raises(ConfigError, match="another process"), exclusively(tmp_path):
        pass


def test_open_ports_are_chosen_and_taken_ones_refused() -> None:
    config = make_config()
    config.network.replay_port = config.network.weights_port = 0
    chosen = port_overrides(config)
    assert [each.split("=")[0] for each in chosen] == ["network.replay_port", "network.weights_port"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.network.replay_port = taken.getsockname()[1]
        config.network.weights_port = free_ports(1)
        with pytest.raises(UnavailableError, match="replay_port"):
            port_overrides(config)


def test_every_role_has_its_own_name_and_the_ranks_of_a_learner_are_one_role() -> None:
    config = TrainConfig(cluster=ClusterConfig(actors=2, scorers=2, learner_ranks=2))
    commands = role_commands(config, ["a=b"])
    assert [each.name for each in commands] == ["replay", "scoring-0", "scoring-1", "actor-0", "actor-1", "learner"]
    assert all(each.command[-1] == "a=b" for each in commands)
    config.replay.shards = 2
    assert [each.name for each in role_commands(config, [])][:3] == ["replay-0", "replay-1", "scoring-0"]
