from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, StoppedError, UnavailableError
from asyncrl.machine.ports import LOOK_S, TAKEN_S, TakenPort, free_ports, listening, who_listens


def test_no_port_is_chosen_that_a_connection_may_get_before_its_server_listens() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 0
    if first < 32768:
        pytest.skip("here connections are given other ports than Linux gives them by default")
    assert all(free_ports(4) + 4 <= first for _ in range(20))


def test_that_no_ports_are_free_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match="no 1 free ports in a row"):
            free_ports(1, range(port, port + 1))


def test_a_port_is_known_by_the_process_that_listens_there() -> None:
    code = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1])\ninput()"
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        told = who_listens(port)
        other.communicate("\n")
    assert told.startswith(f"; process {other.pid} listens there: {sys.executable} -u -c import socket s = ")
    assert who_listens(port) == ""


def test_a_role_whose_port_stays_taken_ends_after_a_while_with_the_key_and_what_to_do() -> None:
    now = 100.0
    port, error = TakenPort("network.replay_port=5755", lambda: now), UnavailableError("process 7 listens there")
    while now < 100.0 + TAKEN_S:
        port.failed(error)
        now += LOOK_S
    with pytest.raises(ConfigError, match=r"^network\.replay_port=5755: process 7 listens there; free that port"):
        port.failed(error)


def test_a_role_listens_once_its_port_is_free_again_and_says_meanwhile_why_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    tries = iter([UnavailableError("process 7 listens there"), UnavailableError("process 7 listens there"), None])

    def listen() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "listens"

    assert listening(listen, "network.replay_port=5755", NoWait()) == "listens"
    assert [each.count("process 7 listens there") for each in caplog.messages] == [1]


def test_a_stop_ends_the_wait_for_a_port() -> None:
    stop = threading.Event()
    stop.set()

    def listen() -> None:
        raise UnavailableError("process 7 listens there")

    with pytest.raises(StoppedError, match=r"network\.replay_port=5755"):
        listening(listen, "network.replay_port=5755", stop)


class NoWait(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()
