"""A start says which of the named servers do not answer."""

from __future__ import annotations

import logging
import socket

import pytest

from asyncrl.config.schema import EngineConfig
from asyncrl.launch.preflight.servers import warn_of_silent_servers
from asyncrl.machine.ports import free_ports
from tests.helpers import GENEROUS_S


def warnings(engine: EngineConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "asyncrl.train"):
        warn_of_silent_servers(engine, GENEROUS_S)
    return [record.getMessage() for record in caplog.records]


def test_a_url_at_which_no_server_answers_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    silent = f"http://127.0.0.1:{free_ports(1)}"
    [alone] = warnings(EngineConfig("sglang", urls=[silent]), caplog)
    assert alone.startswith(f"engine.urls: no server answers at {silent} yet (Connection refused)")
    assert "no episode starts before it does" in alone
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert warnings(EngineConfig("sglang", urls=[answers]), caplog) == []
        [one_of_two] = warnings(EngineConfig("vllm", urls=[answers, silent]), caplog)
        assert "episodes start on the others only" in one_of_two
        [routed] = warnings(EngineConfig("sglang", router=silent), caplog)
        assert routed.startswith("engine.router: no server answers at")


def test_an_engine_without_named_servers_asks_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(EngineConfig(), caplog) == []
    assert warnings(EngineConfig("sglang"), caplog) == []


def test_a_url_with_an_impossible_port_is_told_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    [told] = warnings(EngineConfig("sglang", urls=["http://127.0.0.1:99999"]), caplog)
    assert "Port out of range" in told
