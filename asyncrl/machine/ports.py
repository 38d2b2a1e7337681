"""Finds free ports of this machine, and waits for a port that another program has taken."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from textwrap import shorten
from typing import TypeVar

import psutil

from asyncrl.errors import ConfigError, StoppedError, UnavailableError
from asyncrl.masking import masked_text

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PORTS = range(10000, 32768)
"""The ports above the well-known ones, and below the ones that Linux gives to connections by default."""
TRIES = 1000
MOST_OF_COMMAND = 200
TAKEN_S = 10.0
"""The time for which a role tries to listen at its port. A connection or a killed process may hold the port for a
moment."""
LOOK_S = 0.5


def free_ports(count: int, ports: range = PORTS) -> int:
    """Return the first of `count` consecutive ports within `ports` that are free now. Raises UnavailableError: there
    are none.

    The ports stay free while a slow server starts: the kernel gives none of the default `ports` to an outgoing
    connection, as long as net.ipv4.ip_local_port_range is Linux's default.
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
    """Raises OSError: the port is taken, or this process is not allowed to listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def is_free(host: str, port: int) -> bool:
    """True if this process can listen at a port."""
    try:
        try_port(host, port)
    except OSError:
        return False
    return True


def claim(port: int) -> socket.socket | None:
    """Claim a port among the runs of this machine, until the returned socket is closed or this process ends. Return
    None if another run has claimed the port."""
    # The roles of a run listen only after the checks of the run, so a second run would find the port free meanwhile. An
    # abstract name of a socket needs no file, and the kernel removes it with the process.
    own = socket.socket(socket.AF_UNIX)
    try:
        own.bind(f"\0asyncrl port {port}")
    except OSError:
        own.close()
        return None
    return own


def who_listens(port: int) -> str:
    """Return a clause that names the process that listens at a port of this machine. The clause is empty if no process
    listens, or if this process is not allowed to see it."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None:
                command = shorten(masked_text(" ".join(psutil.Process(each.pid).cmdline())), MOST_OF_COMMAND)
                return f"; process {each.pid} listens there: {command}"
    return ""


class TakenPort:
    """The tries of a role to listen at the port that the configuration names as `setting`, such as "KEY=VALUE"."""

    def __init__(self, setting: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._setting, self._clock = setting, clock
        self._first: float | None = None

    def failed(self, error: Exception) -> None:
        """Record a failed try. Another may follow after LOOK_S seconds. Raises ConfigError if tries have failed for
        TAKEN_S seconds. After this error the supervisor does not restart the role: a restart would not help, and would
        keep other roles waiting."""
        if self._first is None:
            self._first = self._clock()
            logger.warning("%s: %s; trying again for %g s", self._setting, error, TAKEN_S)
        if self._clock() - self._first >= TAKEN_S:
            raise ConfigError(
                f"{self._setting}: {error}; free that port or name another one (0: a free one is chosen), and resume "
                "the run"
            ) from error


def listening(listen: Callable[[], T], setting: str, stop: threading.Event) -> T:
    """Call `listen` until it opens the port of `setting`, as long as TakenPort allows. Raises ConfigError: the port
    stays taken; StoppedError: `stop` was set meanwhile."""
    taken = TakenPort(setting)
    while True:
        try:
            return listen()
        except UnavailableError as error:
            taken.failed(error)
        if stop.wait(LOOK_S):
            raise StoppedError(f"stopped while it waited for the port of {setting}")
