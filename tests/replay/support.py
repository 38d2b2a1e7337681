"""A replay's core over a store in a folder, with a clock that tests move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.replay import report
from asyncrl.replay.admission import Admission
from asyncrl.replay.feed import Feed
from asyncrl.replay.rules import Rules
from asyncrl.replay.service import Service
from asyncrl.replay.store import Store
from asyncrl.types import BatchPlan, Labels, RunIdentity, Ticket, Trajectory
from asyncrl.wire import Message, decode, encode, join, labels_message, read_trajectory, split, trajectory_message
from tests.helpers import make_labels, make_task, make_trajectory


def make_rules(**changes: Any) -> Rules:
    values: dict[str, Any] = {
        "admission": Admission(max_lag=1, per_version=4),
        "feed": Feed([make_task(i) for i in range(5)], seed=0, shuffle=True),
        "held_out": [make_task(100 + i) for i in range(3)],
        "group_size": 2,
        "batch_size": 4,
        "publish_every": 1,
        "max_attempts": 2,
        "temperature": 1.0,
        "high_water_bytes": 1 << 28,
    }
    return Rules(**{**values, **changes})


class Core:
    """Calls of the replay's operations, a transaction each; `restart` is what follows a kill."""

    def __init__(self, path: Path, rules: Rules, lease_s: float = 10.0, run: RunIdentity | None = None) -> None:
        self.now = 0.0
        self._run = run
        self._path, self.rules, self._lease_s = path, rules, lease_s
        self._open()

    def _open(self) -> None:
        self.store = Store(self._path, 1 << 28, durable=False)
        self.service = Service(self.rules, self._lease_s, lambda: self.now, run=self._run)
        with self.store.transaction() as tx:
            self.service.start(tx)

    def restart(self) -> None:
        self.store.close()
        self._open()

    def tickets(
        self,
        want: int,
        worker: str = "a",
        holding: list[str] | None = None,
        life: str = "1",
        waiting: list[str] | None = None,
    ) -> list[Ticket]:
        with self.store.transaction() as tx:
            self.service.episodes.not_begun(waiting or [])
            return self.service.episodes.tickets(tx, worker, life, holding or [], want)

    def put(self, trajectory: Trajectory) -> str:
        with self.store.transaction() as tx:
            return self.service.episodes.put(tx, trajectory, join(encode(trajectory_message(trajectory))))

    def fail(self, ticket: str) -> None:
        with self.store.transaction() as tx:
            self.service.episodes.fail(tx, ticket, "broken")

    def lease(
        self,
        count: int = 100,
        worker: str = "s",
        tokens: int = 1 << 20,
        life: str = "1",
        serves: Sequence[str] = ("rules",),
    ) -> list[Trajectory]:
        with self.store.transaction() as tx:
            leased = self.service.labelling.lease(tx, worker, life, serves, count, tokens)
            return [read_trajectory(decode(split(each.frames))) for each in leased]

    def label(self, trajectory: str, reward: float = 1.0, worker: str = "s") -> bool:
        labels: Labels = make_labels(trajectory, reward)
        with self.store.transaction() as tx:
            return self.service.labelling.label(tx, worker, labels, join(encode(labels_message(labels))))

    def scoring_failed(self, trajectory: str, worker: str = "s") -> None:
        with self.store.transaction() as tx:
            self.service.labelling.fail(tx, worker, trajectory, "nonsense")

    def plan(self, step: int) -> BatchPlan | None:
        with self.store.transaction() as tx:
            return self.service.planning.plan(tx, step)

    def skip(self, step: int, reason: str = "poison") -> int:
        with self.store.transaction() as tx:
            return self.service.planning.skip(tx, step, reason)

    def publish(self, version: int) -> None:
        with self.store.transaction() as tx:
            self.service.planning.published(tx, version)

    def checkpointed(self, steps: int, kept: int | None = None) -> None:
        """A checkpoint of `steps` steps was written; the oldest that is kept is one of `kept`, else this one."""
        with self.store.transaction() as tx:
            self.service.planning.checkpointed(tx, steps, steps if kept is None else kept)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        with self.store.transaction() as tx:
            self.service.tick(tx)

    def ask(self, kind: str, **body: Any) -> Mapping[str, Any]:
        """The body of the reply to a request."""
        with self.store.transaction() as tx:
            reply = self.service.handle(tx, Message(kind, 0, body))
        assert reply is not None
        return reply.body

    def status(self) -> dict[str, Any]:
        with self.store.transaction(write=False) as tx:
            return report.status(tx, self.rules)

    def audit(self) -> dict[str, Any]:
        with self.store.transaction(write=False) as tx:
            return report.audit(tx, self.rules.admission.uses)

    def run_episodes(self, want: int, version: int = 0) -> list[str]:
        """Take tickets, run them, label them; returns the trajectories' ids."""
        done = []
        for ticket in self.tickets(want):
            self.put(make_trajectory(ticket, version))
            done.append(ticket.id)
        for trajectory in self.lease():
            self.label(trajectory.id)
        return done
