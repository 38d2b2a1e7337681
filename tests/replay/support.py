"""The real replay in tests: without sockets and with a clock that tests move, or in a thread with clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import UnavailableError
from asyncrl.ids import is_evaluation
from asyncrl.network.listener import Listener
from asyncrl.network.sockets import connect
from asyncrl.replay import protocol
from asyncrl.replay.client.client import ReplayClient, read_leases
from asyncrl.replay.messages import Call, Reply
from asyncrl.replay.protocol import ReplayRequest
from asyncrl.replay.server import ReplayServer
from asyncrl.replay.service import ReplayService
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord
from asyncrl.replay.store.store import Store
from asyncrl.types import BatchPlan, LabelNeeds, Labels, RunIdentity, Task, Ticket, Trajectory
from asyncrl.wire import (
    Buffer,
    Message,
    decode,
    encode,
    join,
    labels_message,
    read_labels,
    read_trajectory,
    split,
    trajectory_message,
)
from tests.helpers import FakeSpans, make_labels, make_played, make_task, until


def make_settings(**changes: Any) -> ReplaySettings:
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
    return ReplaySettings(**{**values, **changes})


class Core:
    """The replay's requests as calls, a transaction each; `restart` is what follows a kill."""

    def __init__(
        self,
        path: Path,
        settings: ReplaySettings,
        lease_s: float = 10.0,
        run: RunIdentity | None = None,
    ) -> None:
        self.now = 0.0
        self.spans = FakeSpans(lambda: self.now)
        self._run = run
        self._path, self._settings, self._lease_s = path, settings, lease_s
        self._open()

    def _open(self) -> None:
        self.store = Store(self._path, 1 << 28, durable=False)
        self.service = ReplayService(
            self._settings, self._lease_s, lambda: self.now, run=self._run, ends=True, spans=self.spans
        )
        with self.store.transaction() as tx:
            self.service.start(tx)
            self.service.clean(tx)

    def restart(self, settings: ReplaySettings | None = None) -> None:
        self.store.close()
        self._settings = settings or self._settings
        self._open()

    def call(self, call: Call) -> Reply | None:
        """The reply to a request; None where there is nothing yet."""
        with self.store.transaction() as tx:
            return self.service.handle(tx, call)

    def ask(self, request: ReplayRequest, frames: Sequence[Buffer] = ()) -> Any:
        """The body of the reply; None where there is nothing yet."""
        reply = self.call(Call(request.kind, 1, request, frames=frames))
        return reply and reply.body

    def tickets(
        self,
        want: int,
        worker: str = "a",
        holding: Sequence[str] = (),
        life: str = "1",
        waiting: Sequence[str] = (),
    ) -> list[Ticket]:
        return self.ask(protocol.GetTickets(worker, life, list(holding), list(waiting), want)) or []

    def put(self, trajectory: Trajectory, images: Sequence[bytes] = ()) -> str:
        frames = [*encode(trajectory_message(trajectory)), *images]
        return str(self.ask(protocol.PutTrajectory(len(images)), frames))

    def image(self, trajectory: str, name: bytes) -> bytes:
        reply = self.call(Call("FetchImage", 1, protocol.FetchImage(trajectory, name)))
        assert reply is not None
        return bytes(reply.frames[0])

    def deliver(self, tickets: Iterable[Ticket], **changes: Any) -> list[str]:
        """Put a trajectory for each ticket; their ids."""
        return [ticket.id for ticket in tickets if self.put(make_played(ticket, **changes))]

    def fail(self, ticket: str) -> None:
        self.ask(protocol.FailEpisode(ticket, "broken"))

    def leased(
        self,
        count: int = 100,
        worker: str = "s",
        tokens: int = 1 << 20,
        life: str = "1",
        serves: Sequence[str] = ("rules",),
        groups: int = 1,
    ) -> Reply:
        request = protocol.LeaseTrajectories(worker, life, list(serves), count, tokens, groups)
        return self.call(Call(request.kind, 1, request)) or Reply([])

    def lease(self, *arguments: Any, **options: Any) -> list[Trajectory]:
        return self.leased_trajectories(self.leased(*arguments, **options))

    @staticmethod
    def leased_trajectories(reply: Reply) -> list[Trajectory]:
        return [lease.trajectory for lease in read_leases(reply.body, reply.frames)]

    def label(self, trajectory: str, reward: float = 1.0, worker: str = "s", life: str = "1") -> None:
        self.put_labels(make_labels(trajectory, reward), worker, life)

    def label_all(self, reward: float = 1.0) -> None:
        """Lease and label what waits for its scores."""
        for trajectory in self.lease():
            self.label(trajectory.id, reward)

    def put_labels(self, labels: Labels, worker: str = "s", life: str = "1") -> None:
        self.ask(protocol.PutLabels(worker, life), encode(labels_message(labels)))

    def put_group_labels(self, labels: Sequence[Labels], worker: str = "s", life: str = "1") -> None:
        self.ask(protocol.PutGroupLabels(worker, life), [join(encode(labels_message(each))) for each in labels])

    def label_group(self, ids: Sequence[str], reward: float = 1.0, worker: str = "s", life: str = "1") -> None:
        self.put_group_labels([make_labels(each, reward) for each in ids], worker, life)

    def damage(self, trajectory: str) -> None:
        """Flip a bit of a stored trajectory."""
        key = trajectory.encode()
        with self.store.transaction() as tx:
            raw, data = tx._raw, tx._tables["data"]
            value = bytes(raw.get(key, db=data))
            raw.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=data)

    def scoring_failed(self, trajectory: str, worker: str = "s", life: str = "1", reason: str = "nonsense") -> None:
        self.ask(protocol.FailScoring(worker, life, trajectory, reason))

    def configure(self, values: Mapping[str, Any]) -> list[ConfigChange]:
        changes: list[ConfigChange] = self.ask(
            protocol.Configure(dict(values), int(self.now), self.status()["depth_plans"])
        )
        return changes

    def require(self, needs: LabelNeeds, first: int = 1) -> None:
        self.ask(protocol.RequireLabels(first, [*needs.scores], needs.unit_steps))

    def plan(self, step: int) -> BatchPlan | None:
        plan: BatchPlan | None = self.ask(protocol.GetPlan(step, ahead=False))
        return plan

    def plan_ahead(self, step: int) -> BatchPlan | None:
        plan: BatchPlan | None = self.ask(protocol.GetPlan(step, ahead=True))
        return plan

    def planned(self, step: int) -> BatchPlan:
        """The plan of a step that is there."""
        plan = self.plan(step)
        assert plan is not None
        return plan

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        return [read_trajectory(message) for message in self._fetch("data", ids)]

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        return [read_labels(message) for message in self._fetch("labels", ids)]

    def _fetch(self, table: Any, ids: Sequence[str]) -> list[Message]:
        reply = self.call(Call("Fetch", 1, protocol.Fetch(table, list(ids))))
        assert reply is not None
        return [decode(split(frame)) for frame in reply.frames]

    def task(self, name: str) -> Task | None:
        task: Task | None = self.ask(protocol.GetTask(name))
        return task

    def skip(self, step: int, reason: str = "poison") -> int:
        return int(self.ask(protocol.SkipPlan(step, reason)))

    def publish(self, version: int) -> None:
        self.ask(protocol.Published(version))

    def checkpointed(self, steps: int, kept: int | None = None) -> None:
        """A checkpoint of `steps` steps was written; the oldest that is kept is one of `kept`, else this one."""
        self.ask(protocol.Checkpointed(steps, steps if kept is None else kept))

    def evaluate(self, version: int) -> None:
        self.ask(protocol.Evaluate(version))

    def evaluation(self, version: int) -> Any:
        return self.ask(protocol.GetEvaluation(version, False))

    def requeue(self, ticket: str) -> str:
        return str(self.ask(protocol.Requeue(ticket)))

    def discard(self, ticket: str) -> None:
        self.ask(protocol.Discard(ticket))

    def dead_letters(self) -> dict[str, DeadLetter]:
        with self.store.transaction(write=False) as tx:
            return dict(DeadLetter.all(tx))

    def holding(self, worker: str = "a") -> list[str]:
        """The tickets that an actor holds."""
        with self.store.transaction(write=False) as tx:
            return tx.members("held", worker)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        with self.store.transaction() as tx:
            self.service.tick(tx)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.ask(protocol.GetStatus())
        return status

    def audit(self) -> dict[str, Any]:
        audit: dict[str, Any] = self.ask(protocol.GetAudit())
        return audit

    def sampled_tokens(self, state: str) -> int:
        """The sampled tokens of all trajectories for training in a state."""
        with self.store.transaction(write=False) as tx:
            records = [record for _, record in TrajectoryRecord.all(tx) if not is_evaluation(record.group)]
        return sum(record.sampled for record in records if record.state == state)

    def masked_tokens(self, state: str) -> int:
        """The sampled tokens of all trajectories for training in a state that their plan does not train."""
        with self.store.transaction(write=False) as tx:
            return sum(record.masked for _, record in TrajectoryRecord.all(tx) if record.state == state)

    def run_episodes(self, want: int, version: int = 0) -> list[str]:
        """Take tickets, run them, label them; returns the trajectories' ids."""
        done = self.deliver(self.tickets(want), version=version)
        self.label_all()
        return done


class ReplayThread:
    """The real replay in a thread, with clients over real sockets. `kill` ends it without a farewell, `start` serves
    the same store at the same port again; at the end of a `with` block it is killed, and all clients are closed."""

    def __init__(
        self,
        path: Path,
        settings: ReplaySettings | None = None,
        max_bytes: int = 1 << 28,
        clock: Callable[[], float] = time.monotonic,
        run: RunIdentity | None = None,
        endpoint: str = "tcp://127.0.0.1:*",
    ) -> None:
        self.endpoint = endpoint
        self.context: zmq.Context[Any] = zmq.Context()
        self._path, self._settings, self._max_bytes = path, settings or make_settings(), max_bytes
        self._clock, self._run = clock, run
        self._clients: list[ReplayClient] = []

    def __enter__(self) -> ReplayThread:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.close()
        self.kill()
        self.context.destroy(linger=0)

    def start(self) -> None:
        self.store = Store(self._path, self._max_bytes, durable=False)
        self._listener: Listener = until(self._listen)
        self.endpoint = self._listener.endpoint
        service = ReplayService(self._settings, 10.0, self._clock, run=self._run, ends=True)
        server = ReplayServer(self._listener.socket, self.store, service, self._clock)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=server.run, args=(self._stop,), daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return self._thread.is_alive()

    def _listen(self) -> Listener | None:
        """A port that was served a moment ago may not be free at once."""
        try:
            return Listener(self.context, self.endpoint, None, 1 << 30)
        except UnavailableError:
            return None

    def kill(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._listener.close()
            self.store.close()

    def client(self, worker: str = "a", **options: Any) -> ReplayClient:
        self._clients.append(ReplayClient(self.endpoint, worker, "1", context=self.context, **options))
        return self._clients[-1]

    def peer(self) -> zmq.Socket[bytes]:
        """A bare connection."""
        return connect(self.context, self.endpoint, None)
