"""Ports of this machine for servers that are about to start."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

from asyncrl.errors import UnavailableError

LOOPBACK = "127.0.0.1"
PORTS = range(10000, 32768)
"""Above those that services are known for, and below those that Linux gives to connections by default."""
TRIES = 1000


def free_ports(count: int, ports: range = PORTS) -> int:
    """The first of `count` ports in a row, within `ports`, on which nobody listens now.

    None of them is one that the kernel may give to a connection before a server that takes long to start listens there,
    as long as net.ipv4.ip_local_port_range is Linux's default: another range is not avoided. Raises UnavailableError.
    """
    for _ in range(TRIES):
        first = ports.start + secrets.randbelow(len(ports) - count + 1)
        with suppress(OSError):
            for port in range(first, first + count):
                try_port(LOOPBACK, port)
            return first
    raise UnavailableError(
        f"no {count} free ports in a row were found from {ports.start} to {ports.stop - 1}; "
        "end what listens there, or name the ports in the configuration"
    )


def try_port(host: str, port: int) -> None:
    """Raises OSError: somebody listens there, or it cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
