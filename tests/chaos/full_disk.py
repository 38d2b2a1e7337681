"""`unshare -Urm python -m tests.chaos.full_disk SMALL OTHER`: a run whose folder is on a small disk that fills up.

A small file system is mounted at SMALL. It is filled twice, and each time the run goes on once there is room again.

The first time no process ends, and a look at the run tells that the disk is full. Episodes are delivered soon after
there is room: how soon is printed. The second time the replay and a scorer are killed too, and every other process must
go on without a restart. The exit status 0 says that all of this was so.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from asyncrl.replay.stored import StoredRun
from asyncrl.runs.run import Run as RunReader
from asyncrl.runs.state.watch import RunWatch
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import until

SIZE_MB = 96
FULL_S = 20.0
"""Several reports of every role, and more than one lease."""
LATE_S = 20.0
"""Far more than the first delivery takes on a busy machine, and far less than a wait for each request in flight."""


def fill(folder: Path) -> list[Path]:
    """Take all room that is left, in pieces down to a byte; the files that do."""
    ballast = []
    for size in (1 << 20, 4096, 1):
        path = folder / f"ballast-{size}"
        ballast.append(path)
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(b"x" * size) == size:
                pass
    return ballast


def stay_full(run: Run) -> None:
    """Return after FULL_S, in which the run must not end."""
    until_s = time.monotonic() + FULL_S
    while time.monotonic() < until_s:
        assert run.process.poll() is None, run.output
        time.sleep(0.2)


def make_room(ballast: list[Path]) -> None:
    for path in ballast:
        path.unlink()


def delivered(run: Run) -> int:
    with closing(StoredRun(run.dir / "replay")) as stored:
        return stored.counters()["accepted"]


def nothing_ends(run: Run, small: Path) -> None:
    before, watch, ballast = run.processes(), RunWatch(RunReader(run.dir)), fill(small)
    told = until(lambda: text if "replay postpones requests: the store" in (text := watch.look().text) else "")
    assert "there is no room on its disk" in told
    stay_full(run)
    reached = delivered(run)
    make_room(ballast)
    room = time.monotonic()
    until(lambda: delivered(run) > reached, LATE_S)
    sys.stdout.write(f"the first delivery came {time.monotonic() - room:.2f} s after there was room\n")
    run.wait_for_step(run.newest_step() + 2)
    assert run.processes() == before, run.logs()


def killed_roles_come_back(run: Run, small: Path) -> None:
    before, killed, ballast = run.processes(), ("replay", "scoring-0"), fill(small)
    for name in killed:
        run.kill(name)
    stay_full(run)
    make_room(ballast)
    run.wait_for_step(run.newest_step() + 3)
    after = run.processes()
    same = {name: pid for name, pid in before.items() if name not in killed}
    assert {name: after.get(name) for name in same} == same, run.logs()
    assert all(after[name] != before[name] for name in killed)


def main(small: Path, other: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(small)], check=True)
    world = World.make(other)
    with Run("train", small, *world.overrides(1), "learner.steps=1000000", "learner.checkpoint_every=1") as run:
        run.wait_for_step(2)
        roles = {"replay", "actor-0", "actor-1", "scoring-0", "scoring-1", "learner-0", "learner-1"}
        assert roles < run.processes().keys()
        nothing_ends(run, small)
        killed_roles_come_back(run, small)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
