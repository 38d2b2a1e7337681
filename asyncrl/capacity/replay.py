"""Runs the real replay within a simulation: its service without sockets, with a store in a temporary folder and with
simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import numpy as np

from asyncrl.capacity.description import Sizes
from asyncrl.replay import protocol
from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.sampling import Filters
from asyncrl.replay.batches.selection import Selection
from asyncrl.replay.from_config import masks_old, sampler, spare_batches, wait_s
from asyncrl.replay.messages import Call
from asyncrl.replay.service import ReplayService
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.records import THROWN_AWAY, TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.store import Store
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import BatchPlan, Finish, Labels, Role, Task, Ticket, Trajectory, Turn
from asyncrl.wire import encode, labels_message, trajectory_message

SOURCE, SCORER, KIND = "simulated", "simulated", "rules"
MAX_STORE_BYTES = 1 << 36
"""The maximum size of the store in bytes. It reserves address space, not memory."""
TOKENS = 64
"""The simulated scorer leases trajectories of up to this many tokens on average. A simulated trajectory has only one
token of the prompt, and one token for each version that sampled it."""
PROMPT = (Turn(0, 1, Role.PROMPT),)


class SimulatedReplay(AbstractContextManager["SimulatedReplay"]):
    """A replay with these settings. `clock` gives simulated seconds."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float]) -> None:
        self._service = ReplayService(settings, math.inf, clock)
        self._wanted = settings.batch_size // settings.group_size
        self._closing = ExitStack()
        folder = Path(self._closing.enter_context(TemporaryDirectory()))
        self._store = Store(folder, MAX_STORE_BYTES, durable=False)
        self._closing.callback(self._store.close)
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.close()
        self._closing.close()

    def _begin(self) -> None:
        self._transaction = ExitStack()
        self._tx: Transaction = self._transaction.enter_context(self._store.transaction())

    def tickets(self, actor: str, holding: Sequence[str], want: int) -> list[Ticket]:
        """Return the tickets that the replay has for an actor now, at most `want`."""
        request = protocol.GetTickets(actor, actor, list(holding), [], want)
        return self._ask(request) or []

    def put(
        self,
        ticket: Ticket,
        versions: Sequence[int],
        sampled: int,
        turns: int,
        timings: Mapping[str, float] | None = None,
    ) -> str:
        """Deliver an episode that these `versions`, in ascending order, sampled. The trajectory has only one token of
        each version. Its record gets the true number of sampled tokens and of turns. `timings` has the seconds of its
        phases. Returns "stored", or "late" if its group was dropped."""
        runs = [(0, -1), *enumerate(versions, 1)]
        length = len(runs)
        trajectory = Trajectory(
            id=ticket.id,
            task_id=ticket.task.id,
            group_id=ticket.group_id,
            member=ticket.member,
            tokens=np.arange(length, dtype=np.int32),
            logprobs=np.zeros(length, np.float32),
            version_runs=np.array(runs, np.int32),
            turns=(*PROMPT, Turn(1, length, Role.ASSISTANT, "stop")),
            steps=(),
            finish=Finish.COMPLETED,
            timings=timings or {},
        )
        reply = self._ask(protocol.PutTrajectory(0), encode(trajectory_message(trajectory)))
        record = TrajectoryRecord.load(self._tx, ticket.id)
        if record is not None:
            record.sampled, record.turns = sampled, turns
            record.save(self._tx, ticket.id)
        return str(reply)

    def fail(self, ticket: Ticket) -> None:
        """Report a failed episode."""
        self._ask(protocol.FailEpisode(ticket.id, "simulated"))

    def lease(self, scorer: str, trajectories: int) -> list[str]:
        """Lease up to `trajectories` trajectories that wait for a scorer."""
        request = protocol.LeaseTrajectories(scorer, scorer, [KIND], trajectories, TOKENS * trajectories, 1)
        return self._tx.members("leased", scorer) if self._ask(request) else []

    def label(self, scorer: str, trajectory: str, reward: float) -> None:
        labels = Labels(trajectory, reward, reward, SCORER)
        self._ask(protocol.PutLabels(scorer, scorer), encode(labels_message(labels)))

    def plan(self, step: int, ahead: bool = False) -> BatchPlan | None:
        """Return the batch plan of a step, or `None` if the replay cannot make it yet. `ahead` says that the learner is
        still training the step before."""
        return self._ask(protocol.GetPlan(step, ahead))  # type: ignore[no-any-return]

    def has_batch(self) -> bool:
        """True if enough groups are complete for a batch. Some of them may be too old."""
        return self._tx.count("ready") >= self._wanted

    def end_step(self, steps: int, version: int | None) -> None:
        """Report that `steps` steps are trained, and that `version` is published, if it is not `None`."""
        if version is not None:
            self._ask(protocol.Published(version))
        self._ask(protocol.Checkpointed(steps, steps))
        # Each step has its own transaction, because a single one would keep the whole simulation in memory.
        self.commit()

    def commit(self) -> None:
        """End the present transaction. Only then does the replay count failures, to give out fewer tickets while
        everything fails."""
        self._transaction.close()
        self._begin()

    def selection(self) -> Selection:
        """Return the decided episodes, as the replay counts them."""
        return cohorts.selection(self._tx)

    def ids(self, states: Sequence[TrajectoryState] = THROWN_AWAY) -> list[str]:
        """Return the ids of the trajectories in these states. The default is all that were thrown away."""
        return [name for name, record in TrajectoryRecord.all(self._tx) if record.state in states]

    def _ask(self, request: protocol.ReplayRequest, frames: Sequence[Any] = ()) -> Any:
        reply = self._service.handle(self._tx, Call(request.kind, 0, request, None, frames))
        return None if reply is None else reply.body


def simulated_settings(sizes: Sizes, tasks: int, seed: int) -> ReplaySettings:
    """Return the settings of a replay for a run of these sizes, with `tasks` tasks, whose ids are their numbers."""
    rows = [Task(str(row), [{"role": "user", "content": ""}], "", SOURCE) for row in range(tasks)]
    return ReplaySettings(
        admission=sizes.admission,
        feed=Feed(rows, seed, shuffle=True),
        held_out=(),
        group_size=sizes.group_size,
        batch_size=sizes.batch_size,
        publish_every=sizes.publish_every,
        max_attempts=3,
        temperature=1.0,
        high_water_bytes=MAX_STORE_BYTES,
        filters=Filters(zero_variance=sizes.filter_zero_variance),
        sampler=sampler(sizes.replay.sampler),
        spare_batches=spare_batches(sizes.replay),
        wait_s=wait_s(sizes.replay),
        masks_old=masks_old(sizes.replay),
        seed=seed,
    )
