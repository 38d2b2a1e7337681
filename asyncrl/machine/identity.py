"""Identifies a process, even if another process gets the same process id later."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATE, _THREADS, _BEGAN = 0, 17, 19
"""The indices of three fields of /proc/PID/stat, counted from the field after the name of the program."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process.

    - `kernel`: the kernel that gave the pid. Another boot of the machine and another namespace of process ids count as
      another kernel
    - `pid`: the process id
    - `began`: the time at which the process began
    """

    kernel: str
    pid: int
    began: str

    @staticmethod
    def of(pid: int) -> ProcessIdentity | None:
        """Return the process that has this id here, or None if there is none or it has ended."""
        began = _began(pid)
        return ProcessIdentity(this_kernel(), pid, began) if began is not None else None

    @property
    def is_here(self) -> bool:
        """True if the process is visible to the current process."""
        return self.kernel == this_kernel()

    @property
    def is_alive(self) -> bool:
        """True if the process runs here. A zombie counts as ended if all of its threads have ended."""
        return self.is_here and _began(self.pid) == self.began

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process, if it runs here."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process, its descendants, and the group that it leads, if the process runs here."""
        if not self.is_alive:
            return
        for each in self.descendants():
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            leads = os.getpgid(self.pid) == self.pid
            (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)

    def descendants(self) -> list[ProcessIdentity]:
        """Return the children of the process, their children, and so on."""
        try:
            children = psutil.Process(self.pid).children(recursive=True) if self.is_alive else []
        except psutil.Error:
            return []
        return [found for each in children if (found := ProcessIdentity.of(each.pid)) is not None]


def this_kernel() -> str:
    """Return a name that this process shares with all processes whose ids it can see."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def boot_of(kernel: str) -> str:
    """Return the part of a kernel's name that all namespaces of the machine share until the machine boots again."""
    return kernel.partition("/")[0]


def _began(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except ProcessLookupError:
        return None
    except FileNotFoundError:
        return _began_elsewhere(pid) if not Path("/proc/self/stat").exists() else None
    fields = text.rpartition(")")[2].split()
    # A killed process is a zombie once its main thread has ended. It keeps ports and locks until its last thread has
    # ended.
    return None if fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1 else fields[_BEGAN]


def _began_elsewhere(pid: int) -> str | None:
    """Do the same as `_began` if the kernel is not Linux."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None
