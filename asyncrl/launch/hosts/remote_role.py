"""Starts a role on its host and watches it: `python -m asyncrl.launch.hosts.remote_role keep ... COMMAND...`.

It starts the command, prints its process id, and reads stdin, to which the launcher writes a byte every second. The
byte `STOP` asks the role to stop, `DRAIN` asks it to finish its episodes first, and `KILL` kills it. The role also has
to stop if the launcher closes stdin, and it is killed if the launcher is silent until the lease expires. The exit
status is the role's, or 128 plus the number of the signal that killed it.

The launcher may lose the connection before it reads the process id, and then starts the role again at once. So each
attempt to start the role has a number, and a file in the folder of the role's heartbeat has the number and the process
of the latest attempt. An attempt starts nothing if one with a higher number came before. Otherwise it first ends the
process of the earlier attempt.

`check CANARY INDEX COUNT` prints the host's GPUs and CPUs. If the host sees the file CANARY, the command writes an
answer into its folder. `end RUN_DIR` ends the roles on this host that an earlier launcher of the run has left.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.launch.survivors import Survivor, end_all, end_here
from asyncrl.machine import process
from asyncrl.machine.child import kill_group, start_child
from asyncrl.machine.identity import ProcessIdentity, this_kernel
from asyncrl.machine.shared_folder import answer_to, sees
from asyncrl.version import VERSION

ALIVE, STOP, DRAIN, KILL = b".", b"s", b"d", b"k"
STARTED = b"asyncrl role "
"""Marks the line that names the process: the host may print a greeting first."""
COUNT = "count"
POLL_S = 0.1
READ_BYTES = 4096
KEPT_BYTES = 512
SIGNALLED = 128
UNWANTED = SIGNALLED + signal.SIGTERM
"""The exit status of an attempt that came too late: the launcher no longer wants the role, or has started it again."""
ENDED = "asyncrl ended "
"""Precedes the kernel id (`ProcessIdentity.kernel`) of this host in the answer to `end`."""


class KeptRole(msgspec.Struct, frozen=True):
    """One attempt to start a role on this host, and the process of the role. The launcher with the id `launcher`
    numbers its attempts."""

    launcher: str
    number: int
    kernel: str = ""
    pid: int = 0
    began: str = ""

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.kernel, self.pid, self.began)


def start_alone(start: KeptRole, beats: Path, log: Path, command: list[str]) -> subprocess.Popen[bytes] | None:
    """Start a role whose heartbeat is the file `beats`, after ending the process of an earlier attempt on this host.
    `None`: a later attempt came first, so nothing was started."""
    beats.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(beats.with_name(f"{beats.name}.start"), os.O_RDWR | os.O_CREAT, 0o600), "r+b", 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # After a power loss the file may have any content, but then the process has ended, too.
        with suppress(msgspec.DecodeError):
            earlier = msgspec.json.decode(file.read(), type=KeptRole)
            if earlier.launcher == start.launcher and earlier.number > start.number:
                return None
            if earlier.process.is_alive:
                end_all([Survivor(beats.name, earlier.process, beats)], threading.Event())
        child = start_child(command, log, {})
        identity = ProcessIdentity.of(child.pid) or ProcessIdentity("", child.pid, "")
        kept = KeptRole(start.launcher, start.number, identity.kernel, identity.pid, identity.began)
        try:
            # Each attempt overwrites the same bytes, so that a full disk has room for them.
            os.pwrite(file.fileno(), msgspec.json.encode(kept).ljust(KEPT_BYTES), 0)
        except OSError:
            kill_group(child)  # A later attempt would not know of the process, and the role would run twice.
            raise
        sys.stdout.write(f"\n{STARTED.decode()}{kept.pid} {kept.kernel or '-'} {kept.began or '-'}\n")
        sys.stdout.flush()
        return child


def keep(start: KeptRole, beats: Path, log: Path, lease_s: float, command: list[str]) -> int:
    """Run `command` until it ends or its lease expires. Return its exit status, or 128 plus the signal's number."""
    told = os.read(sys.stdin.fileno(), READ_BYTES) if select.select([sys.stdin.fileno()], [], [], 0)[0] else ALIVE
    is_wanted = told and STOP not in told and KILL not in told
    child = start_alone(start, beats, log, command) if is_wanted else None
    if child is None:
        return UNWANTED
    heard, listening = time.monotonic(), [sys.stdin.fileno()]
    while child.poll() is None:
        told = ALIVE
        if select.select(listening, [], [], POLL_S)[0]:
            heard, told = time.monotonic(), os.read(listening[0], READ_BYTES)
        if STOP in told or not told:
            child.terminate()
        if DRAIN in told:
            child.send_signal(process.DRAIN)
        if not told:  # The launcher has closed the pipe, and the lease is still running.
            listening = []
        if KILL in told or time.monotonic() - heard > lease_s:
            kill_group(child)
    return child.returncode if child.returncode >= 0 else SIGNALLED - child.returncode


def check(canary: Path, index: int, count_gpus: bool) -> dict[str, object]:
    """Return the version of asyncrl, the GPUs and CPUs of this host, and whether the host sees the file `canary`. If it
    does, write an answer into the folder of `canary`."""
    if seen := sees(canary):
        answer_to(canary, index).touch()
    gpus = 0
    if count_gpus:
        import torch

        gpus = torch.cuda.device_count()
    cpus = len(os.sched_getaffinity(0))
    return {"version": VERSION, "sees": seen, "gpus": gpus, "cpus": cpus}


def main() -> None:
    """Run the command line."""
    # Ctrl-C and a closed terminal also reach the launcher, which then asks the role to stop.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    match sys.argv[1:]:
        case ["check", canary, index, count_gpus]:
            sys.stdout.write(json.dumps(check(Path(canary), int(index), count_gpus == COUNT)) + "\n")
        case ["end", run_dir]:
            end_here(Path(run_dir))
            sys.stdout.write(f"{ENDED}{this_kernel()}\n")
        case ["keep", launcher, number, beats, log, lease_s, *command]:
            start = KeptRole(launcher, int(number))
            sys.exit(keep(start, Path(beats), Path(log), float(lease_s), command))


if __name__ == "__main__":
    main()
