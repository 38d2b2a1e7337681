"""A client of the replay without a network, for the rooms that need one in their tests."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import RefusedError, WireError
from asyncrl.ids import feed_group, ticket_id
from asyncrl.replay.client.client import Outcome, read_leases
from asyncrl.replay.protocol import FailEpisode, FailScoring, RenewLease
from asyncrl.types import BatchPlan, LabelNeeds, Labels, Lease, Task, Ticket, Trajectory
from tests.replay.support import Core, make_settings


def feed_ticket(number: int, attempt: int = 0) -> str:
    """The id of an attempt of the feed's ticket `number`, in groups of one."""
    return ticket_id(feed_group(number), 0, attempt)


class FakeReplay:
    """The methods of `ReplayClient` that actors, scorers and learners call, over a replay's `core` in this process.

    The rules are the real ones. Without a core, a new one with these settings is made in a temporary folder. Several
    threads may call. `calls` are those of the learner, `failed` the reasons by the id of what failed.
    """

    def __init__(self, core: Core | None = None, **settings: Any) -> None:
        if core is None:
            self._folder = TemporaryDirectory()
            core = Core(Path(self._folder.name), make_settings(**settings))
        self.core = core
        self.calls: list[tuple[str, int]] = []
        self.failed: dict[str, str] = {}
        self._lock = threading.Lock()

    def called(self, name: str) -> list[int]:
        return [argument for call, argument in self.calls if call == name]

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
        with self._lock:
            return self.core.tickets(want, holding=holding, waiting=waiting)

    def put(self, trajectory: Trajectory, images: Mapping[bytes, bytes] = MappingProxyType({})) -> str:
        with self._lock:
            return self.core.put(trajectory, list(images.values()))

    def put_all(
        self, trajectories: Sequence[Trajectory], images: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> list[Outcome]:
        return [self._outcome(each, images) for each in trajectories]

    def _outcome(self, trajectory: Trajectory, images: Mapping[bytes, bytes]) -> Outcome:
        try:
            return self.put(trajectory, {name: images[name] for name in trajectory.image_names})
        except (RefusedError, WireError) as error:
            return error

    def fail_all(self, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            self.fail(name, reason)

    def fail(self, ticket_id: str, reason: str) -> None:
        with self._lock:
            self.core.ask(FailEpisode(ticket_id, reason))
            self.failed[ticket_id] = reason

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int, groups: int = 1) -> list[Lease]:
        with self._lock:
            reply = self.core.leased(trajectories, tokens=tokens, serves=serves, groups=groups)
        return list(read_leases(reply.body, reply.frames))

    def renew(self) -> None:
        with self._lock:
            self.core.ask(RenewLease("s"))

    def label(self, labels: Sequence[Labels]) -> list[RefusedError | WireError | None]:
        with self._lock:
            return [self._refused(each) for each in labels]

    def _refused(self, labels: Labels) -> RefusedError | WireError | None:
        try:
            self.core.put_labels(labels)
        except (RefusedError, WireError) as error:
            return error
        return None

    def label_group(self, labels: Sequence[Labels]) -> None:
        with self._lock:
            self.core.put_group_labels(labels)

    def scoring_failed(self, trajectory_id: str, reason: str) -> None:
        with self._lock:
            self.core.ask(FailScoring("s", "1", trajectory_id, reason))
            self.failed[trajectory_id] = reason

    def configure(self, values: Mapping[str, Any], time: int) -> list[ConfigChange]:
        return self.core.configure(values)

    def require(self, needs: Mapping[int, LabelNeeds]) -> None:
        self.core.require(needs[max(needs)], max(needs))

    def plan(self, step: int) -> BatchPlan | None:
        self.calls.append(("plan", step))
        return self.core.plan(step)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        return self.core.plan_ahead(step)

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        return self.core.labels(ids)

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        return self.core.fetch(ids)

    def image(self, trajectory: str, name: bytes) -> bytes:
        return self.core.image(trajectory, name)

    def task(self, name: str) -> Task | None:
        return self.core.task(name)

    def published(self, version: int) -> None:
        self.calls.append(("published", version))
        self.core.publish(version)

    def checkpointed(self, steps: int, kept: int) -> None:
        self.calls.append(("checkpointed", steps))
        self.core.checkpointed(steps, kept)

    def evaluate(self, version: int) -> None:
        self.calls.append(("evaluate", version))
        self.core.evaluate(version)

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        self.calls.append(("evaluation", version))
        result: Mapping[str, Any] | None = self.core.evaluation(version)
        return result
