"""Writes `processes.json` in a run's folder: the host, the process and the number of restarts of each role.

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
from asyncrl.runs.processes import ProcessRecord

log = logging.getLogger(__name__)

RENEWED_S = 5.0


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


def record_of(process: RoleProcess, restarts: int) -> ProcessRecord:
    """The record of a role's process that was started again `restarts` times."""
    if process.poll() is not None:
        return ProcessRecord(process.host, 0, restarts)
    which = process.identity or ProcessIdentity("", 0, "")
    return ProcessRecord(process.host, process.pid, restarts, which.kernel, which.began, process.lease_s)
