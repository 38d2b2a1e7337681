"""Reads `processes.json` in a run's folder: the host, the process and the number of restarts of each role.

The supervisor of a run writes the file (`asyncrl/launch/process_records.py`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.config.locations import PROCESSES_FILE
from asyncrl.machine.identity import ProcessIdentity


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

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.kernel, self.pid, self.began)


def read_records(run_dir: Path) -> dict[str, ProcessRecord]:
    """The records of the last supervisor of a folder, by role. There are none without a file, or if it is damaged.
    Raises OSError: the file cannot be read."""
    try:
        return msgspec.json.decode((run_dir / PROCESSES_FILE).read_bytes(), type=dict[str, ProcessRecord])
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
