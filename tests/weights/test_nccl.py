import os
import threading

import pytest

from asyncrl.config.schema import EngineConfig, TrainConfig, WeightsConfig
from asyncrl.learner import run as learner
from asyncrl.weights.group import agree_with_servers, keep_to_loopback, loopback_interface

CUMEM = "NCCL_CUMEM_ENABLE"


def config(kind="sglang", into_servers="nccl", channel="zmq"):
    return TrainConfig(
        engine=EngineConfig(kind=kind), weights=WeightsConfig(into_servers=into_servers, channel=channel)
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    # Whatever a test sets goes with it.
    monkeypatch.setenv(CUMEM, "")
    del os.environ[CUMEM]


def test_an_actor_sends_by_nccl_as_sglang_does():
    agree_with_servers(config())
    assert os.environ[CUMEM] == "0"


@pytest.mark.parametrize("other", [{"kind": "embedded"}, {"into_servers": "auto"}])
def test_nothing_is_set_where_no_server_gets_weights_by_nccl(other):
    agree_with_servers(config(**other))
    assert CUMEM not in os.environ


def test_what_the_environment_says_stays():
    os.environ[CUMEM] = "1"
    agree_with_servers(config())
    assert os.environ[CUMEM] == "1"


@pytest.mark.parametrize(("channel", "expected"), [("distributed", "0"), ("zmq", None)])
def test_a_learner_in_a_group_with_such_an_actor_agrees_before_its_ranks_join(channel, expected, monkeypatch):
    class JoiningError(Exception):
        pass

    def joined():
        raise JoiningError

    monkeypatch.setattr(learner, "joined", joined)
    with pytest.raises(JoiningError):
        learner.run(config(channel=channel), threading.Event())
    assert os.environ.get(CUMEM) == expected


@pytest.mark.parametrize(
    ("host", "actor", "others", "expected"),
    [
        ("127.0.0.1", False, {"channel": "distributed"}, "=lo"),
        ("10.0.0.1", False, {}, "=lo"),
        ("10.0.0.1", False, {"channel": "distributed"}, None),
        ("127.0.0.1", True, {}, None),
        ("127.0.0.1", True, {"kind": "embedded"}, "=lo"),
    ],
)
def test_nccl_stays_on_this_machine_but_where_weights_leave_it(host, actor, others, expected, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    del os.environ["NCCL_SOCKET_IFNAME"]
    given = config(**others)
    given.network.host = host
    keep_to_loopback(given, actor)
    assert (os.environ.get("NCCL_SOCKET_IFNAME") or None) == (expected and expected.replace("lo", loopback_interface()))
