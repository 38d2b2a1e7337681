"""Stubs of `srun`, `scontrol` and `sbatch` for one machine, which do as Slurm's do, as far as a launcher notices.

A step's tasks are processes here. SIGUSR1 and SIGUSR2 go on to them. SIGTERM kills them, without a chance to stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

ADDRESS = "127.0.0.1"


def write_programs(folder: Path) -> Path:
    """Programs of these names in a folder, which a PATH may begin with."""
    folder.mkdir()
    for name in ("srun", "scontrol", "sbatch"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).absolute()} {name} "$@"\n')
        program.chmod(0o755)
    return folder


def srun(words: list[str]) -> int:
    first = next(index for index, word in enumerate(words) if not word.startswith("--"))
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words[:first])
    tasks: list[subprocess.Popen[bytes]] = []
    early: list[int] = []
    started = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        # A task can be ready, and be asked to stop, before Popen has returned here.
        if not started:
            early.append(number)
            return
        for task in tasks:
            task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

    signal.signal(signal.SIGUSR1, hand_on)
    signal.signal(signal.SIGUSR2, hand_on)
    signal.signal(signal.SIGTERM, hand_on)
    for node in options["nodelist"].split(","):
        environment = {**os.environ, "SLURMD_NODENAME": node, "SLURM_GPUS_ON_NODE": "0"}
        tasks.append(subprocess.Popen(words[first:], env=environment))
    started = True
    for number in early:
        hand_on(number, None)
    statuses = [task.wait() for task in tasks]
    return max(128 - status if status < 0 else status for status in statuses)


def sbatch(words: list[str]) -> int:
    """Jobs are numbered, and never run. One of more than 30 nodes is refused."""
    if "--nodes=31" in words:
        sys.stderr.write("sbatch: error: Batch job submission failed: More processors requested than permitted\n")
        return 1
    requests = Path(os.environ["STUB_REQUESTS"])
    with requests.open("a") as file:
        file.write(f"sbatch {' '.join(words)}\n")
    sys.stdout.write(f"{100 + len(requests.read_text().splitlines())};cluster\n")
    return 0


def scontrol(words: list[str]) -> int:
    if requests := os.environ.get("STUB_REQUESTS"):
        with Path(requests).open("a") as file:
            file.write(" ".join(words) + "\n")
    match words:
        case ["show", "hostnames", names]:
            sys.stdout.write(names.replace(",", "\n") + "\n")
        case ["show", "node", name, *_]:
            sys.stdout.write(f"NodeName={name} Arch=x86_64 NodeAddr={ADDRESS} NodeHostName={name} State=IDLE\n")
        case ["show", "job", job]:
            sys.stdout.write(f"JobId={job} JobName=asyncrl\n   {os.environ.get('STUB_JOB', '')}\n")
        case ["requeue", job] if job == "refused":
            sys.stderr.write("Requested operation is presently disabled\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol, "sbatch": sbatch}[sys.argv[1]](sys.argv[2:]))
