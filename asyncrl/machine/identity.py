"""The identity of a process: after the end of one, another may have its process id."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATE, _THREADS, _BEGAN = 0, 17, 19
"""Fields of /proc/PID/stat after the name of the program."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process: the `kernel` that counts its `pid`, and when it `began` by that kernel's clock. Another start of the
    machine is another kernel, and so is another namespace of process ids."""

    kernel: str
    pid: int
    began: str

    @staticmethod
    def of(pid: int) -> ProcessIdentity | None:
        """The process that has this id here; None: none has it, or it has ended."""
        began = _began(pid)
        return ProcessIdentity(this_kernel(), pid, began) if began is not None else None

    @property
    def is_here(self) -> bool:
        """True if this process can look at it."""
        return self.kernel == this_kernel()

    @property
    def is_alive(self) -> bool:
        """True if it runs here. A zombie has ended if all of its threads have."""
        return self.is_here and _began(self.pid) == self.began

    def ask_to_end(self) -> None:
        """Send it SIGTERM, if it runs here."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, if it runs here, its children, and the processes of the group that it leads."""
        if not self.is_alive:
            return
        for each in self.descendants():
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            leads = os.getpgid(self.pid) == self.pid
            (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)

    def descendants(self) -> list[ProcessIdentity]:
        """The children of the process, and theirs."""
        try:
            children = psutil.Process(self.pid).children(recursive=True) if self.is_alive else []
        except psutil.Error:
            return []
        return [found for each in children if (found := ProcessIdentity.of(each.pid)) is not None]


def this_kernel() -> str:
    """A name that all processes which this one sees have in common: their ids are of one series."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def boot_of(kernel: str) -> str:
    """The part of the name that the kernels of all namespaces of a machine share, from its start to its end."""
    return kernel.partition("/")[0]


def _began(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except ProcessLookupError:
        return None
    except FileNotFoundError:
        return _began_elsewhere(pid) if not Path("/proc/self/stat").exists() else None
    fields = text.rpartition(")")[2].split()
    # A process that was killed is a zombie as soon as its main thread has ended; until its last one has, it keeps ports
    # and locks.
    return None if fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1 else fields[_BEGAN]


def _began_elsewhere(pid: int) -> str | None:
    """The same where the kernel is not Linux."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None
