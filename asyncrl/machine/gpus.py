"""Lists the NVIDIA GPUs of this host, as their driver describes them."""

from __future__ import annotations

import csv
import shutil
import subprocess
from dataclasses import dataclass

from asyncrl.text import reason_of

QUERY = ("name", "memory.total", "memory.used", "compute_mode", "driver_version")
PROGRAM_S = 60.0


@dataclass(frozen=True, slots=True)
class GpuFact:
    """A GPU as its driver describes it. Memory is in MiB."""

    name: str
    memory: int
    used: int
    compute_mode: str


def driver_gpus() -> tuple[list[GpuFact], str, str]:
    """Return the GPUs that the driver shows, the driver's version, and the reason if it shows none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return [], "", "there is no nvidia-smi"
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], "", reason_of(error)
    if output.returncode:
        return [], "", (output.stdout + output.stderr).strip()
    rows = [[cell.strip() for cell in row] for row in csv.reader(output.stdout.splitlines()) if row]
    gpus = [GpuFact(name, _mib(total), _mib(used), mode) for name, total, used, mode, _ in rows]
    return gpus, rows[0][-1] if rows else "", ""


def _mib(text: str) -> int:
    # A GPU that shares the host's memory has "[N/A]" there.
    return int(text) if text.isdecimal() else 0
