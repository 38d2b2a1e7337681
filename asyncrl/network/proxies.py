"""Lets HTTP clients connect directly to addresses that the proxy of their environment cannot reach."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Environment variables that list the hosts which clients reach without a proxy. If both are set, some clients read the
first, and others the second."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def reach_directly(hosts: Iterable[str], environment: MutableMapping[str, str]) -> None:
    """Change the environment so that its HTTP clients connect to loopback and `hosts` directly, not through the proxy.
    Nothing changes if the environment names no proxy."""
    if not any(name.lower() in PROXIES and value for name, value in environment.items()):
        return
    listed = dict.fromkeys(
        each.strip() for name in EXCEPTIONS for each in environment.get(name, "").split(",") if each.strip()
    )
    environment.update(dict.fromkeys(EXCEPTIONS, ",".join(dict.fromkeys((*listed, *LOOPBACK, *hosts)))))
