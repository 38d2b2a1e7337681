"""Checks the address at which a process will listen. The loopback address is always allowed. Any other address needs
keys or network.insecure=true."""

from __future__ import annotations

import ipaddress

from asyncrl.errors import ConfigError

TRUSTED = "network.insecure=true on a network where you trust everyone"
KEYS_FIX = f"set network.keys to a folder that `asyncrl keys` made, or {TRUSTED}"
GROUP_FIX = f"gloo and NCCL have no keys; set weights.to_engines to zmq or disk, or {TRUSTED}"
HOSTS_FIX = f"gloo and NCCL between hosts have no keys and do not encrypt; set {TRUSTED}"
SERVER_GROUP_FIX = f"gloo and NCCL have no keys; set weights.into_servers=disk, or {TRUSTED}"
CHAT_API_FIX = f"agents are answered over plain HTTP; set 127.0.0.1, or {TRUSTED}"

PROMETHEUS_FIX = f"metrics go over plain HTTP to everyone who asks; set 127.0.0.1, or {TRUSTED}"


def check_bind(
    host: str, insecure: bool, secured: bool = False, key: str = "network.host", fix: str = KEYS_FIX
) -> None:
    """Raises ConfigError: other machines can reach `host`, and neither keys (`secured`) nor `insecure` allow it."""
    if not (is_loopback(host) or secured or insecure):
        raise ConfigError(f"{key}={host}: other machines can reach this address: {fix}")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
