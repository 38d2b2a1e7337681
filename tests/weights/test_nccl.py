"""The environment of NCCL before the first group of a process."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest

from asyncrl.config.schema import EngineConfig, TrainConfig, WeightsConfig
from asyncrl.learner import from_config as learner
from asyncrl.learner.ranks.launcher import VARIABLE
from asyncrl.machine.activity import Activity
from asyncrl.network.interfaces import loopback_interface
from asyncrl.weights.from_config import route_settings
from asyncrl.weights.nccl import agree_with_servers, keep_to_loopback

CUMEM, INTERFACE = "NCCL_CUMEM_ENABLE", "NCCL_SOCKET_IFNAME"


def config(
    kind: str = "sglang", into_servers: str = "nccl", to_engines: str = "zmq", host: str = "127.0.0.1"
) -> TrainConfig:
    weights = WeightsConfig(into_servers=into_servers, to_engines=to_engines)
    config = TrainConfig(engine=EngineConfig(kind=kind), weights=weights)
    config.network.host = host
    return config


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [
        (config(), {}, {CUMEM: "0"}),
        (config(), {CUMEM: "1"}, {CUMEM: "1"}),
        (config(kind="embedded"), {}, {}),
        (config(into_servers="auto"), {}, {}),
    ],
)
def test_nccl_goes_without_cumem_where_servers_get_weights_by_it(
    given: TrainConfig, before: dict[str, str], expected: dict[str, str]
) -> None:
    agree_with_servers(route_settings(given), before)
    assert before == expected


@pytest.mark.parametrize(
    ("given", "actor", "on_loopback"),
    [
        (config(to_engines="distributed"), False, True),
        (config(host="10.0.0.1"), False, True),
        (config(host="10.0.0.1", to_engines="distributed"), False, False),
        (config(), True, False),
        (config(into_servers="auto"), True, True),
        (config(kind="embedded"), True, True),
    ],
)
def test_nccl_stays_on_this_machine_unless_weights_leave_it(given: TrainConfig, actor: bool, on_loopback: bool) -> None:
    environment: dict[str, str] = {}
    keep_to_loopback(route_settings(given), actor, environment)
    assert environment == ({INTERFACE: f"={loopback_interface()}"} if on_loopback else {})


@pytest.mark.parametrize(("to_engines", "expected"), [("distributed", "0"), ("zmq", None)])
def test_a_learner_in_a_group_with_such_an_actor_agrees_before_its_ranks_join(
    to_engines: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CUMEM, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    del os.environ[CUMEM]
    # With a membership that no launcher wrote, joining fails.
    monkeypatch.setenv(VARIABLE, "{")
    with pytest.raises(msgspec.DecodeError):
        learner.run(config(to_engines=to_engines), threading.Event(), Activity())
    assert os.environ.get(CUMEM) == expected
