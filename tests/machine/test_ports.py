from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import UnavailableError
from asyncrl.machine.ports import free_ports, who_listens


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
