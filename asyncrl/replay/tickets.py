"""Gives actors tickets, each of which permits one episode, and takes the trajectories of the episodes.

A trajectory is taken exactly once: it has the id of its ticket, and the ticket ends in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncrl.errors import BusyError, RefusedError
from asyncrl.replay.batches.old_groups import EARLY_STARTS
from asyncrl.replay.failures.backoff import EPISODES, FailureBackoff
from asyncrl.replay.failures.failure_limit import FailureLimit
from asyncrl.replay.groups import EVALUATION, TRAINING, OpenGroups, pending_queue
from asyncrl.replay.held_out import evaluation
from asyncrl.replay.labels.labelling import Labelling
from asyncrl.replay.labels.leases import WorkerLeases
from asyncrl.replay.messages import Reply
from asyncrl.replay.protocol import GetTickets, Leave
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.stages import Stage, Stages
from asyncrl.replay.starts.fresh_starts import oldest_start
from asyncrl.replay.store.images import keep_images, lacks_images, read_images
from asyncrl.replay.store.records import GroupRecord, TicketRecord, TrajectoryRecord, shorten
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Purpose, Role, Ticket, Trajectory
from asyncrl.wire import TASKS_BYTES, Buffer, join_parts, task_bytes

TICKETS_A_REPLY = 256


class TicketQueue:
    """Handles the requests of actors. Each call is part of the caller's transaction."""

    def __init__(
        self,
        settings: ReplaySettings,
        groups: OpenGroups,
        labelling: Labelling,
        actors: WorkerLeases,
        backoff: FailureBackoff,
        limit: FailureLimit,
        clock: Callable[[], float],
        stages: Stages,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._labelling = labelling
        self._actors = actors
        self._backoff = backoff
        self._limit = limit
        self._clock = clock
        self._stages = stages
        self._given: dict[str, float] = {}

    def resume(self, tx: Transaction) -> None:
        """Continue after a restart. Every actor gets a fresh lease, and every ticket its full time."""
        self._actors.resume(tx)
        now = self._clock()
        self._given = {name: now for worker in tx.keys("held") for name in tx.members("held", worker)}

    def give(self, tx: Transaction, request: GetTickets) -> Reply | None:
        """Give an actor up to `request.want` tickets, and renew its lease. `None` if there are no tickets yet.

        Tickets that were given to the actor in a lost reply come first, and tickets of evaluations come next. While
        there are training tickets, evaluations get at most half of the actor's slots. While all episodes fail, only few
        tickets are issued. If the tasks are too large for one reply, the next reply has the rest."""
        if self._actors.has_left(request.worker, request.incarnation):
            return Reply([])
        now = self._clock()
        self._given |= {name: now for name in request.waiting if name in self._given}
        if self._actors.renew(tx, request.worker, request.incarnation):
            self._take_back(tx, request.worker)
        issued: list[Ticket] = []
        room = TASKS_BYTES
        for ticket in self._choose(tx, request, min(request.want, TICKETS_A_REPLY)):
            issued.append(ticket)
            room -= task_bytes(ticket.task)
            if room <= 0:
                break
        return Reply(issued) if issued or not request.want else None

    def _choose(self, tx: Transaction, request: GetTickets, want: int) -> Iterator[Ticket]:
        lost = sorted(set(tx.members("held", request.worker)).difference(request.holding))[:want]
        for name in lost:
            yield self._ticket(tx, name, TicketRecord.of(tx, name))
        slots, evaluations = (
            len(request.holding) + want,
            sum(pending_queue(name) == EVALUATION for name in (*request.holding, *lost)),
        )
        for _ in range(self._backoff.allowed(want - len(lost))):
            ticket = self._issue(tx, request.worker, evaluations_last=2 * evaluations >= slots)
            if ticket is None:
                return
            evaluations += ticket.purpose is Purpose.EVAL
            self._backoff.issued()
            yield ticket

    def _issue(self, tx: Transaction, worker: str, evaluations_last: bool) -> Ticket | None:
        first, second = (TRAINING, EVALUATION) if evaluations_last else (EVALUATION, TRAINING)
        return self._next_of(tx, first, worker) or self._next_of(tx, second, worker)

    def _next_of(self, tx: Transaction, queue: str, worker: str) -> Ticket | None:
        while True:
            first = tx.first("pending", str, queue)
            if first is None:
                if queue == EVALUATION or not self._groups.open_if_admitted(tx):
                    return None
                continue
            order, name = first
            tx.delete("pending", order)
            record = TicketRecord.load(tx, name)
            # A ticket that was withdrawn and offered again is queued twice. When the second entry reaches the front of
            # the queue, a worker already holds the ticket.
            if record is not None and not record.worker:
                record.worker, record.version = worker, oldest_start(tx, self._settings)
                record.save(tx, name)
                tx.add_member("held", worker, name)
                self._given[name] = self._clock()
                tx.afterwards(self._limit.began, name)
                self._stages.begin(tx, Stage.TICKET, name)
                return self._ticket(tx, name, record)

    def _ticket(self, tx: Transaction, name: str, record: TicketRecord) -> Ticket:
        group = GroupRecord.of(tx, record.group)
        if group.training and group.begun - record.version > tx.counter(EARLY_STARTS):
            tx.set(EARLY_STARTS, group.begun - record.version)
        allowed = max(0, self._settings.oldest_allowed(tx.counter("version")))
        oldest = max(allowed, record.version)
        # If `wait_s` is above 0, the wait for old groups relies on the versions of the tickets. So no older version may
        # start an episode.
        may_fall_back = group.training and allowed < oldest and not self._settings.wait_s
        return Ticket(
            id=name,
            task=self._settings.task(group, record.member),
            group_id=record.group,
            member=record.member,
            purpose=group.purpose,
            temperature=self._settings.temperature_of(group, record.member),
            min_version=oldest if group.training else group.version,
            fallback_version=allowed if may_fall_back else None,
        )

    def _take_back(self, tx: Transaction, worker: str) -> None:
        for name in tx.members("held", worker):
            record = TicketRecord.of(tx, name)
            record.worker, record.version = "", -1
            record.save(tx, name)
            tx.remove_member("held", worker, name)
            self._given.pop(name, None)
            tx.afterwards(self._limit.left, name)
            self._stages.end(tx, Stage.TICKET, name, worker=worker, outcome="taken back")
            tx.append("pending", name, pending_queue(name), urgent=True)
            tx.add("tickets_redelivered")

    def leave(self, tx: Transaction, request: Leave) -> None:
        """Handle an actor's orderly end: its tickets go to other actors."""
        if self._actors.leave(tx, request.worker, request.incarnation):
            self._take_back(tx, request.worker)

    def expire(self, tx: Transaction) -> None:
        """Give the tickets of silent actors to other actors. Tickets that were held for too long count as failed."""
        for worker in self._actors.expire(tx):
            self._take_back(tx, worker)
        horizon = self._clock() - self._settings.longest_episode_s
        for name in [name for name, when in self._given.items() if when < horizon]:
            del self._given[name]
            record = TicketRecord.load(tx, name)
            # A ticket that was withdrawn and offered again may still wait for an actor.
            if record is not None and record.worker:
                self.fail(tx, name, "its actor held the ticket for longer than actor.episode_timeout_s")

    def put(
        self, tx: Transaction, trajectory: Trajectory, frames: Sequence[Buffer], images: Sequence[Buffer] = ()
    ) -> str:
        """Take a trajectory. `frames` is its encoding, and `images` are some or all of its images. Returns "stored";
        "duplicate" if it was stored before; "late" if its ticket has ended, so that it is counted but not stored; or
        "incomplete" if it must be sent again with all its images. Raises RefusedError: it does not match its ticket, or
        its images are refused (`read_images`); BusyError: the store has no room."""
        name = trajectory.id
        if TrajectoryRecord.load(tx, name) is not None:
            tx.add("duplicates")
            return "duplicate"
        ticket = TicketRecord.load(tx, name)
        group = None if ticket is None else GroupRecord.load(tx, ticket.group)
        if ticket is None or group is None:
            tx.add("late")
            tx.add("tokens_thrown_away", trajectory.sampled_tokens)
            return "late"
        _check_match(trajectory, ticket, group)
        self._check(tx, trajectory)
        sent = read_images(images, trajectory)
        if lacks_images(tx, trajectory, sent):
            return "incomplete"
        if tx.episode_bytes() > self._settings.full_bytes:
            raise BusyError("the store is full until the learner releases what it has trained; see replay.max_store_gb")
        record = TrajectoryRecord(
            ticket.group,
            ticket.member,
            len(trajectory),
            trajectory.sampled_tokens,
            trajectory.oldest_version,
            turns=sum(turn.role is Role.ASSISTANT for turn in trajectory.turns),
            finish=trajectory.finish,
            seconds=sum(trajectory.timings.values()),
            data_source=self._settings.task(group).data_source,
            row=group.row,
            newest=trajectory.newest_version,
        )
        tx.afterwards(self._backoff.succeeded, EPISODES)
        tx.afterwards(self._limit.succeeded, name)
        tx.put_bytes("data", name, *join_parts(frames))
        keep_images(tx, trajectory, sent)
        self._stages.end(tx, Stage.TICKET, name, worker=ticket.worker, outcome="stored")
        self._labelling.offer(tx, name, record, group, urgent=not group.training)
        tx.add("accepted" if group.training else "accepted_evaluations")
        if group.training:
            tx.add("tokens_accepted", trajectory.sampled_tokens)
        else:
            evaluation.count_episode(tx, group.version, trajectory)
        self._groups.end_ticket(tx, name, ticket)
        self._given.pop(name, None)
        return "stored"

    def _check(self, tx: Transaction, trajectory: Trajectory) -> None:
        """Raises RefusedError: the learner could not train on the trajectory, and would fail at the plan with it after
        every restart."""
        settings, name, newest = self._settings, trajectory.id, trajectory.newest_version
        if len(trajectory) > settings.max_tokens:
            raise RefusedError(
                f"{name} has {len(trajectory)} tokens; actor.max_tokens (actor.max_total_tokens, if an episode may "
                f"have several sequences) allows {settings.max_tokens:.0f}"
            )
        if settings.vocabulary is not None and (largest := int(trajectory.tokens.max())) >= settings.vocabulary:
            raise RefusedError(
                f"{name} has the token id {largest}, but the policy's embedding has {settings.vocabulary} rows: "
                "the tokenizer of its actor is not the policy's"
            )
        # Engines may serve a version just before the learner reports it to the replay, so a version that is newer by 1
        # is allowed.
        if newest > tx.counter("version") + 1:
            raise RefusedError(f"{name} was sampled by version {newest}, but the newest is {tx.counter('version')}")

    def fail(self, tx: Transaction, ticket: str, reason: str) -> None:
        """Handle a failed episode. A failure whose ticket has ended has no effect."""
        record = TicketRecord.load(tx, ticket)
        if record is None:
            return
        self._stages.end(tx, Stage.TICKET, ticket, worker=record.worker, outcome="failed", reason=shorten(reason))
        self._groups.fail_member(tx, record.group, record.member, reason)
        self._groups.withdraw(tx, ticket)


def _check_match(trajectory: Trajectory, ticket: TicketRecord, group: GroupRecord) -> None:
    """Raises RefusedError: the trajectory is not the one that its ticket is for."""
    name = trajectory.id
    if (trajectory.group_id, trajectory.member) != (ticket.group, ticket.member):
        raise RefusedError(
            f"{name} is marked as member {trajectory.member} of {trajectory.group_id}, but its ticket is for "
            f"member {ticket.member} of {ticket.group}"
        )
    if trajectory.is_demonstration != group.is_demonstration(ticket.member):
        kinds = ["an episode", "a demonstration"]
        was, expected = kinds if group.is_demonstration(ticket.member) else reversed(kinds)
        raise RefusedError(f"{name} is {was}, but its ticket is for {expected}")
