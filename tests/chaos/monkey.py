"""`python -m tests.chaos.monkey --kills N --seed S --shards K`: a real run whose processes are killed, then judged.

Roles and single ranks of the learner get SIGKILL at random moments: one at a time, several at once, again while they
start; some are stopped for longer than a lease first. After the last kill the run is stopped, resumed for a few steps
more, and compared with what its witnesses saw and with an uninterrupted training of its recorded plans. The last line
is JSON; status 1 means that a promise was broken, and the folder of the run is kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from asyncrl.machine.child import last_lines
from asyncrl.machine.ports import free_ports
from asyncrl.replay.stored import StoredRun
from tests.chaos.rule import WITNESS_VARIABLE
from tests.chaos.verdict import judge
from tests.chaos.witness import Witness
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import GENEROUS_S, until

log = logging.getLogger("monkey")

VICTIMS = {"replay": 0.25, "actor": 0.35, "scoring": 0.25, "learner": 0.08, "rank": 0.05}
"""Chances by kind of process: the learner is slowest to start, and without all of its ranks nothing is trained. What is
called the learner here is the process that starts and watches the ranks."""
MEAN_PAUSE_S = 1.0
LONGEST_STOP_S = 7.0
BURST = 10
STEPS_BETWEEN = 2
STEPS_AFTER = 3
WITHOUT_END = 1_000_000
START_S = 120.0
GO_ON_S = 300.0


class Monkey:
    """Sends signals to the roles of `run` until `kills` of them were killed."""

    def __init__(self, run: Run, kills: int, rng: random.Random) -> None:
        self._run = run
        self._wanted = kills
        self._rng = rng
        self._killed: set[int] = set()
        self._stopped: dict[int, float] = {}

    @property
    def kills(self) -> int:
        return len(self._killed)

    def rage(self) -> None:
        """Kill until there were enough kills; after each burst the run must go on."""
        for burst in range(BURST, self._wanted + BURST, BURST):
            while self.kills < min(burst, self._wanted):
                assert self._run.process.poll() is None, self._run.output
                self._continue(time.monotonic())
                self._strike()
                time.sleep(self._rng.expovariate(1 / MEAN_PAUSE_S))
            self._continue(float("inf"))
            goal = self._run.newest_step() + STEPS_BETWEEN
            log.info("%d of %d kills; the run must now reach step %d", self.kills, self._wanted, goal)
            self._run.wait_for_step(goal, GO_ON_S)

    def _strike(self) -> None:
        """One misfortune: a kill, a few at once, a kill in the next start too, or a standstill."""
        roles = self._alive()
        if not roles:
            return
        chance, victim = self._rng.random(), self._victim(roles)
        if chance < 0.55:
            self._kill(roles[victim])
        elif chance < 0.7:
            for name in self._rng.sample(sorted(roles), min(len(roles), self._rng.randint(2, 3))):
                self._kill(roles[name])
        elif chance < 0.85:
            self._kill(roles[victim])
            self._kill_in_start(victim)
        else:
            with suppress(ProcessLookupError):
                os.kill(roles[victim], signal.SIGSTOP)
                self._stopped[roles[victim]] = time.monotonic() + self._rng.uniform(0.5, LONGEST_STOP_S)

    def _victim(self, roles: Collection[str]) -> str:
        ranks = self._run.ranks()
        chances = {name: VICTIMS["rank" if name in ranks else name.split("-")[0]] for name in sorted(roles)}
        return self._rng.choices(list(chances), list(chances.values()))[0]

    def _kill(self, pid: int) -> None:
        if self.kills < self._wanted:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._killed.add(pid)

    def _kill_in_start(self, name: str) -> None:
        until(lambda: name in self._alive(), START_S)
        time.sleep(self._rng.uniform(0, 3))
        if pid := self._alive().get(name):
            self._kill(pid)

    def _alive(self) -> dict[str, int]:
        """Return the processes of the roles and of the learner's ranks that it has not killed yet, by name."""
        return {name: pid for name, pid in self._run.processes().items() if pid not in self._killed}

    def _continue(self, now: float) -> None:
        for pid in [pid for pid, when in self._stopped.items() if when <= now]:
            del self._stopped[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def chaos(folder: Path, kills: int, seed: int, shards: int) -> dict[str, Any]:
    """Run, kill, resume and judge; the verdict."""
    started = time.monotonic()
    world = World.make(folder)
    seen = folder / "judged"
    os.environ[WITNESS_VARIABLE] = str(seen)
    port = free_ports(shards)
    overrides = [*world.overrides(shards), f"network.replay_port={port}"]
    with ExitStack() as stack:
        run = stack.enter_context(Run("train", folder, *overrides, f"learner.steps={WITHOUT_END}"))
        witnesses = [
            stack.enter_context(closing(Witness(f"tcp://127.0.0.1:{port + shard}", "witness", f"{seed}.{shard}")))
            for shard in range(shards)
        ]
        monkey = Monkey(run, kills, random.Random(seed))
        until(run.processes, START_S)
        monkey.rage()
        run.process.send_signal(signal.SIGINT)
        run.process.wait(GENEROUS_S)
        steps = _planned(run.dir) + STEPS_AFTER
        log.info("%d kills are done; the run is resumed to end after %d steps", monkey.kills, steps)
        resumed = stack.enter_context(Run("train", folder, *overrides, f"learner.steps={steps}"))
        resumed.finish()
    log.info("the recorded plans are trained again, without interruption")
    again = folder / "again"
    again.mkdir()
    source = [f"replay.source={run.dir / 'replay'}", f"learner.steps={steps}", "learner.checkpoint_every=1000000"]
    with Run("learner", again, *world.overrides(shards), *source) as uninterrupted:
        uninterrupted.finish()
    verdict = judge(run, uninterrupted.dir, witnesses, set(seen.read_text().split()))
    return {"kills": monkey.kills, **verdict, "steps": steps, "seconds": round(time.monotonic() - started, 1)}


def _planned(run_dir: Path) -> int:
    with closing(StoredRun(run_dir / "replay")) as stored:
        return stored.steps()


def main(arguments: Sequence[str]) -> int:
    """The command; its status."""
    parser = argparse.ArgumentParser(prog="monkey")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    verdict: dict[str, Any] | None = None
    try:
        verdict = chaos(folder, options.kills, options.seed, options.shards)
    except BaseException:
        log.exception("the run failed")
    if verdict is not None:
        sys.stdout.write(json.dumps(verdict) + "\n")
    if verdict is None or verdict["broken"]:
        for path in sorted(folder.glob("**/logs/*.log")):
            log.info("== %s\n%s", path.name, last_lines(path, 15))
        log.error("the folder of the run is %s", folder)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
