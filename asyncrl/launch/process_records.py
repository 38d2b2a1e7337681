"""Writes and reads `processes.json` in a run's folder: the host, the process and the number of restarts of each role.

The supervisor renews the file as long as it lives. If the supervisor was killed, the next supervisor of the run reads
from the file which processes may still run, and for how long at most.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from asyncrl.config.locations import PROCESSES_FILE
from asyncrl.launch.role_process import RoleProcess
from asyncrl.machine.files import write_whole
from asyncrl.machine.identity import ProcessIdentity

log = logging.getLogger(__name__)

RENEWED_S = 5.0


class ProcessRecord(msgspec.Struct, frozen=True):
    """A role's process.

    - `host`: the name of its host;
    - `pid`: its process id there; 0 while the process does not run or its id is unknown;
    - `restarts`: the number of restarts of the role;
    - `kernel`, `began`: see `ProcessIdentity`;
    - `lease_s`: the time for which the process may run without a supervisor; 0 if it does not run.
    """

    host: str
    pid: int
    restarts: int
    kernel: str = ""
    began: str = ""
    lease_s: float = 0.0

    @staticmethod
    def of(process: RoleProcess, restarts: int) -> ProcessRecord:
        if process.poll() is not None:
            return ProcessRecord(process.host, 0, restarts)
        which = process.identity or ProcessIdentity("", 0, "")
        return ProcessRecord(process.host, process.pid, restarts, which.kernel, which.began, process.lease_s)

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.kernel, self.pid, self.began)


class ProcessRecords:
    """Writes the file in the folder of a run. `clock` gives seconds."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = run_dir / PROCESSES_FILE, clock
        self._shown: Mapping[str, ProcessRecord] = {}
        self._renewed = clock()
        self._unwritten = False

    def write(self, records: Mapping[str, ProcessRecord]) -> None:
        """Write the records if they changed, else renew the file every `RENEWED_S` seconds. If the disk is full, a
        later call tries again."""
        try:
            if records != self._shown:
                write_whole(self._path, msgspec.json.encode(records).decode())
            elif self._clock() - self._renewed >= RENEWED_S:
                os.utime(self._path)
            else:
                return
        except OSError as error:
            if not self._unwritten:
                log.warning("%s cannot be written now, and later attempts follow: %s", self._path, error)
            self._unwritten = True
        else:
            self._unwritten, self._shown, self._renewed = False, records, self._clock()


def read_records(run_dir: Path) -> dict[str, ProcessRecord]:
    """Return the records of the last supervisor of a folder. There are none without a file, or if an earlier version of
    asyncrl wrote the file."""
    try:
        return msgspec.json.decode((run_dir / PROCESSES_FILE).read_bytes(), type=dict[str, ProcessRecord])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
