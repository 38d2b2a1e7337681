"""`unshare -Urm python -m tests.chaos.full_disk SMALL OTHER`: a run whose folder is on a small disk that fills up.

SMALL becomes a small file system of its own. While it is full the replay and a scorer are killed too; once there is
room again every other process must still be the same, and the run must go on. Status 0 says that all of it was so.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos.world import World
from tests.end_to_end.support import Run

SIZE_MB = 96
FULL_S = 25.0
"""Several reports of every role, and more than one lease."""


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


def main(small: Path, other: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(small)], check=True)
    world = World.make(other)
    with Run("train", small, *world.overrides(1), "learner.steps=1000000", "learner.checkpoint_every=1") as run:
        run.wait_for_step(2)
        before = run.processes()
        assert {"replay", "actor-0", "actor-1", "scoring-0", "scoring-1", "learner-0", "learner-1"} < before.keys()
        ballast = fill(small)
        killed = ("replay", "scoring-0")
        for name in killed:
            run.kill(name)
        full_until = time.monotonic() + FULL_S
        while time.monotonic() < full_until:
            assert run.process.poll() is None, run.output
            time.sleep(0.2)
        reached = run.newest_step()
        for path in ballast:
            path.unlink()
        run.wait_for_step(reached + 3)
        after = run.processes()
        same = {name: pid for name, pid in before.items() if name not in killed}
        assert {name: after.get(name) for name in same} == same, run.logs()
        assert all(after[name] != before[name] for name in killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
