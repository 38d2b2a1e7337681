"""Which addresses a process may listen on: loopback always, others with keys or with network.insecure=true."""

from __future__ import annotations

import ipaddress

from asyncrl.errors import ConfigError

KEYS_FIX = (
    "set network.keys to a folder that `asyncrl keys` made, or network.insecure=true on a network where you trust "
    "everyone"
)
GROUP_FIX = (
    "gloo and NCCL have no keys; set weights.channel to zmq or disk, or network.insecure=true on a network where you "
    "trust everyone"
)
SERVER_GROUP_FIX = (
    "gloo and NCCL have no keys; use weights.into_servers=disk, or set network.insecure=true on a network where you "
    "trust everyone"
)
CHAT_API_FIX = (
    "agents are answered over plain HTTP; use 127.0.0.1, or network.insecure=true on a network where you trust everyone"
)


def check_bind(
    host: str, insecure: bool, secured: bool = False, key: str = "network.host", fix: str = KEYS_FIX
) -> None:
    """Refuse an address that other machines can reach, without keys (`secured`) or leave. Raises ConfigError."""
    if not (is_loopback(host) or secured or insecure):
        raise ConfigError(f"{key}={host}: other machines can reach this address: {fix}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
