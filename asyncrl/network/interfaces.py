"""Finds the network interfaces of this machine, for connections without ZeroMQ."""

from __future__ import annotations

import socket

import psutil

from asyncrl.errors import ConfigError


def loopback_interface() -> str:
    """Return the name of the loopback interface: lo, or lo0."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`. Raises OSError: there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def interface_towards(host: str, port: int) -> str:
    """Return the name of this machine's network interface on the route to `host`. Raises ConfigError: there is none."""
    try:
        address = address_towards(host, port)
    except OSError as error:
        raise ConfigError(f"{host} cannot be reached from this machine: {error}") from error
    if address.startswith("127."):
        return loopback_interface()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    raise ConfigError(f"no network interface of this machine has the address {address}; set learner.interface")
