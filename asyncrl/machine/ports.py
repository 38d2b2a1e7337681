"""Free ports of this machine."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from textwrap import shorten

import psutil

from asyncrl.errors import UnavailableError
from asyncrl.masking import masked_text

LOOPBACK = "127.0.0.1"
PORTS = range(10000, 32768)
"""Above the well-known ports, and below those that Linux gives to connections by default."""
TRIES = 1000
MOST_OF_COMMAND = 200


def free_ports(count: int, ports: range = PORTS) -> int:
    """The first of `count` consecutive ports within `ports` that are free now. Raises UnavailableError: there are none.

    The kernel gives none of the default `ports` to an outgoing connection while a slow server starts, as long as
    net.ipv4.ip_local_port_range is Linux's default.
    """
    for _ in range(TRIES):
        first = ports.start + secrets.randbelow(len(ports) - count + 1)
        with suppress(OSError):
            for port in range(first, first + count):
                try_port(LOOPBACK, port)
            return first
    raise UnavailableError(
        f"no {count} free ports in a row were found from {ports.start} to {ports.stop - 1}; "
        "stop the processes that listen there, or name the ports in the configuration"
    )


def try_port(host: str, port: int) -> None:
    """Raises OSError: the port is taken, or this process may not listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def who_listens(port: int) -> str:
    """A clause that names the process of this machine which listens at a port; empty: there is none, or this process
    may not see it."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None:
                command = shorten(masked_text(" ".join(psutil.Process(each.pid).cmdline())), MOST_OF_COMMAND)
                return f"; process {each.pid} listens there: {command}"
    return ""
