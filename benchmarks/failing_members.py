"""Simulates groups of which members fail: which tokens are thrown away, and for what reason?

A simulation around the real replay plays the episodes of `benchmarks.gpu_loop` in SLOTS slots, each of which samples
1 / TOKEN_S tokens a second. A failed attempt ends at a random point of its episode. Members fail in five ways:

- `any attempt`: each attempt fails with this probability, independently of its task
- `flaky tasks`: half of the attempts at this share of the tasks fail
- `broken tasks`: every attempt at this share of the tasks fails
- `one member`: every attempt of the first member of this share of the groups fails, and nothing else
- `outage`: once, for this share of 100 s, every running and every new attempt fails

The shares in the results are of all sampled tokens, including those of failed attempts:

- `failed`: tokens of failed attempts
- `dropped`: tokens of healthy members whose group was dropped, before or after their delivery
- `evicted`: tokens of groups that became too old

In `long tasks` nothing fails, but the episodes of this share of the tasks are LONG times as long. `trained_long` is the
share of the trained episodes that are of these tasks.

    python -m benchmarks.failing_members
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import simpy

from asyncrl.capacity.description import Sizes
from asyncrl.capacity.engines import Process
from asyncrl.capacity.replay import SimulatedReplay, simulated_settings
from asyncrl.replay.store.records import TrajectoryState
from asyncrl.types import Ticket
from benchmarks.loop_workload import Workload
from benchmarks.record import write_result

TASKS, SLOTS, BATCH, MAX_LAG = 1000, 256, 64, 8
TOKEN_S, POLL_S, SCORER = 0.01, 1.0, "scorer"
LEARNERS = {"fast": 2.0, "slow": 8.0}
"""Maps each learner to the seconds of a step. Engines are slower than the fast one, and faster than the slow one."""
OUTAGE_AT_S, REFUSED_S = 120.0, 1.0
"""The begin of the outage. An attempt that starts in it fails after REFUSED_S."""
WAYS = ("any attempt", "flaky tasks", "broken tasks", "one member", "outage")
SHARES = (0.01, 0.05, 0.2)
FIRST, STEPS = 15, 45
LONG = 4
OLD_GROUPS: dict[str, dict[str, Any]] = {
    "evicted": {"wait_s": 0.0},
    "evicted and reissued": {"wait_s": 0.0, "reissue_evicted": True},
    "waited for": {"wait_s": 3600.0},
}
"""Maps each treatment of groups that become too old to its settings of the replay."""


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation: how and how often members fail, and the settings of the run."""

    way: str
    share: float
    members: int = 8
    learner: str = "fast"
    old_groups: str = "evicted"

    def failure(self, ticket: Ticket, now: float, seconds: float) -> float | None:
        """The share of an attempt after which it fails, if it begins `now` and takes `seconds`. `None` if it does not
        fail."""
        match self.way:
            case "outage":
                is_over = now >= OUTAGE_AT_S + 100 * self.share
                fails_after = REFUSED_S if now >= OUTAGE_AT_S else OUTAGE_AT_S - now
                return None if is_over or fails_after >= seconds else fails_after / seconds
            case "any attempt":
                fails = _dice(ticket.id) < self.share
            case "flaky tasks":
                fails = _dice(ticket.task.id) < self.share and _dice(ticket.id) < 0.5
            case "broken tasks":
                fails = _dice(ticket.task.id) < self.share
            case "long tasks":
                fails = False
            case _:
                fails = ticket.member == 0 and _dice(ticket.group_id) < self.share
        return random.Random(f"ends {ticket.id}").random() if fails else None

    def is_long(self, ticket: Ticket) -> bool:
        return self.way == "long tasks" and _dice(ticket.task.id) < self.share


def _dice(name: str) -> float:
    return random.Random(f"fails {name}").random()


class Simulation:
    """Actors, a scorer that takes no time and a learner around a replay."""

    def __init__(self, case: Case, environment: simpy.Environment, replay: SimulatedReplay) -> None:
        self._case, self._environment, self._replay = case, environment, replay
        self._workload = Workload.named("heavy")
        self._version, self._waits_s = 0, 0.0
        self._holding: set[str] = set()
        self._delivered: dict[str, int] = {}
        self._long: set[str] = set()
        self._trained: list[str] = []
        self._tokens: Counter[str] = Counter()
        self._changed = environment.event()

    def run(self) -> dict[str, float]:
        """Train FIRST steps, which fill the run, and STEPS steps, which are measured. Returns the shares of tokens of
        the whole simulation, and the speed of the measured steps."""
        self._environment.process(self._poll())
        self._environment.run(self._environment.process(self._learn(0, FIRST)))
        began, before, waited_s = self._environment.now, self._tokens["trained"], self._waits_s
        self._environment.run(self._environment.process(self._learn(FIRST, FIRST + STEPS)))
        for state in (TrajectoryState.EVICTED, TrajectoryState.DROPPED):
            self._tokens[state] += sum(self._delivered[each] for each in self._replay.ids([state]))
        total, seconds = sum(self._tokens.values()), self._environment.now - began
        shares = {name: self._tokens[name] / total for name in ("failed", "dropped", "evicted")}
        speed = {"trained_tokens_per_s": (self._tokens["trained"] - before) / seconds, "step_s": seconds / STEPS}
        long = sum(name in self._long for name in self._trained) / len(self._trained)
        return {**shares, **speed, "learner_waits": (self._waits_s - waited_s) / seconds, "trained_long": long}

    def _learn(self, first: int, end: int) -> Process:
        for step in range(first, end):
            began = self._environment.now
            while (plan := self._replay.plan(step)) is None:
                self._start()
                yield self._changed
            self._waits_s += self._environment.now - began
            self._trained += plan.ids
            self._tokens["trained"] += sum(self._delivered[name] for name in plan.ids)
            yield self._environment.timeout(LEARNERS[self._case.learner])
            self._version = step + 1
            self._replay.end_step(step + 1, step + 1)
            self._start()

    def _start(self) -> None:
        """Start as many episodes as there are free slots and tickets."""
        for ticket in self._replay.tickets("actor", tuple(self._holding), SLOTS - len(self._holding)):
            self._holding.add(ticket.id)
            self._environment.process(self._play(ticket))

    def _poll(self) -> Process:
        """Ask for tickets again and again, since the replay gives out few tickets while everything fails."""
        while True:
            self._start()
            yield self._environment.timeout(POLL_S)

    def _play(self, ticket: Ticket) -> Process:
        turns, oldest = self._workload.episode(ticket.id), self._version
        is_long = self._case.is_long(ticket)
        sampled = sum(turn.tokens for turn in turns) * (LONG if is_long else 1)
        seconds = sampled * TOKEN_S + sum(turn.wait_s for turn in turns[:-1])
        failure = self._case.failure(ticket, self._environment.now, seconds)
        yield self._environment.timeout(seconds * (1.0 if failure is None else failure))
        self._holding.remove(ticket.id)
        if failure is not None:
            self._tokens["failed"] += round(failure * sampled)
            self._replay.fail(ticket)
        elif self._replay.put(ticket, range(oldest, self._version + 1), sampled, len(turns)) == "late":
            self._tokens["dropped"] += sampled
        else:
            self._delivered[ticket.id] = sampled
            self._long |= {ticket.id} if is_long else set()
            for trajectory in self._replay.lease(SCORER, BATCH):
                self._replay.label(SCORER, trajectory, float(ticket.member % 2))
        self._replay.commit()
        self._start()
        changed, self._changed = self._changed, self._environment.event()
        changed.succeed()


def run(case: Case) -> dict[str, float]:
    sizes = Sizes(engines=1, batch_size=BATCH, group_size=case.members, max_lag=MAX_LAG, masks_old=False)
    settings = replace(simulated_settings(sizes, TASKS, 0), **OLD_GROUPS[case.old_groups])
    environment = simpy.Environment()
    with SimulatedReplay(settings, lambda: environment.now) as replay:
        return Simulation(case, environment, replay).run()


def cases() -> Iterator[Case]:
    for members, learner in ((8, "fast"), (16, "fast"), (8, "slow")):
        yield Case("any attempt", 0.0, members, learner)
        for way, share in product(WAYS if members == 8 and learner == "fast" else WAYS[:2], SHARES):
            yield Case(way, share, members, learner)
    yield Case("long tasks", 0.1)
    failing = (("any attempt", 0.0), ("any attempt", 0.2), ("flaky tasks", 0.2), ("long tasks", 0.1))
    for old_groups, (way, share) in product(("evicted and reissued", "waited for"), failing):
        yield Case(way, share, old_groups=old_groups)


def described(case: Case) -> dict[str, Any]:
    return {**{name: getattr(case, name) for name in Case.__slots__}, **run(case)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    write_result(
        "failing_members", {"first_steps": FIRST, "steps": STEPS, "rows": [described(case) for case in cases()]}
    )


if __name__ == "__main__":
    main()
