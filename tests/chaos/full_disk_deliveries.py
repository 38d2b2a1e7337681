"""`unshare -Urm python -m tests.chaos.full_disk_deliveries SMALL SECONDS`: clients of a replay whose disk is full.

SMALL becomes a small file system, on which the replay keeps its store. Actors deliver many trajectories at once and a
scorer many labels, while the disk is full for SECONDS. Prints how long after there was room again each client had its
first answers, and all. Status 0: nothing was lost, and no client took more than LATE_S for its first answers.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import Ticket
from tests.chaos.full_disk import fill
from tests.chaos.support import ReplayProcess
from tests.chaos.test_disk import SIZES, long_trajectory
from tests.helpers import GENEROUS_S, make_labels

SIZE_MB = 64
ACTORS = 2
AT_ONCE = 16
"""Requests that one client has in flight."""
LATE_S = 15.0
"""Far more than it takes on a busy machine; with a wait for each request it would be minutes."""


class Calls:
    """Does each of `works` in a thread, one after another; `done` has the times at which they returned."""

    def __init__(self, *works: Callable[[], object]) -> None:
        self.done: list[float] = []
        self._works = works
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for work in self._works:
            work()
            self.done.append(time.monotonic())

    def finish(self) -> None:
        self._thread.join(GENEROUS_S)
        assert len(self.done) == len(self._works)


def deliver(client: ReplayClient, tickets: Sequence[Ticket]) -> Callable[[], object]:
    trajectories = [long_trajectory(ticket) for ticket in tickets]

    def work() -> None:
        assert set(client.put_all(trajectories)) <= {"stored", "duplicate"}

    return work


def main(small: Path, full_s: float) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(small)], check=True)
    with ReplayProcess(small, *SIZES, "replay.max_lag=16") as replay:
        actors, scorer = [replay.client(f"a{index}") for index in range(ACTORS)], replay.client("s")
        tickets = [actor.tickets([], 3 * AT_ONCE) for actor in actors]
        for actor, own in zip(actors, tickets, strict=True):
            deliver(actor, own[:AT_ONCE])()
        leases = scorer.lease(["rules"], AT_ONCE, 1 << 30)
        ballast = fill(small)
        calls = {
            f"actor {index}": Calls(*(deliver(actor, own[start : start + AT_ONCE]) for start in (AT_ONCE, 2 * AT_ONCE)))
            for index, (actor, own) in enumerate(zip(actors, tickets, strict=True))
        }
        calls["scorer"] = Calls(lambda: scorer.label([make_labels(lease.trajectory.id) for lease in leases]))
        replay.wait_for_log("cannot commit")
        time.sleep(full_s)
        for path in ballast:
            path.unlink()
        room = time.monotonic()
        late = []
        for name, each in calls.items():
            each.finish()
            first, last = each.done[0] - room, each.done[-1] - room
            sys.stdout.write(f"{name}: {first:.2f} s to the first answers, {last:.2f} s to all\n")
            late += [name] if first > LATE_S else []
        audit = replay.client("observer").audit()
        assert (audit["lost"], sum(audit["states"].values())) == (0, 3 * AT_ONCE * ACTORS), audit
        assert not late, f"late: {late}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
