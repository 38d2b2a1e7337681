"""A second run with the same name resumes, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.identity import claim
from asyncrl.launch.local import exclusively, port_overrides
from asyncrl.machine.ports import free_ports


def make_config() -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path="m"))
    config.data.train = "t.parquet"
    return config


def test_the_same_configuration_resumes_and_free_keys_may_change(tmp_path: Path) -> None:
    config = make_config()
    assert not claim(config, tmp_path)
    config.learner.steps += 5
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
    import socket

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


def test_no_port_is_chosen_that_a_connection_may_have_before_its_server_listens() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 0
    if first < 32768:
        pytest.skip("here connections are given other ports than Linux gives them by default")
    assert all(free_ports(4) + 4 <= first for _ in range(20))


def test_that_no_ports_are_free_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("asyncrl.machine.ports.PORTS", range(port, port + 1))
        with pytest.raises(UnavailableError, match="no 1 free ports in a row"):
            free_ports(1)
