"""Opens groups when admission allows it, and issues new tickets (permissions to play an episode) for failed members. If
a member fails too often, its whole group is dropped, unless the further attempts are fewer than the episodes of the
group that they may save.

A trajectory that may be trained R times has R uses. The counter `committed` is the number of uses that were admitted
when groups were opened, minus the uses that became free when trajectories were thrown away. `starts/admission.py` and
`starts/pacing.py` limit this counter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from asyncrl.ids import again_group, feed_group, is_evaluation
from asyncrl.network.throttle import Throttled
from asyncrl.replay.batches import cohorts
from asyncrl.replay.failures.backoff import EPISODES, SCORINGS, FailureBackoff
from asyncrl.replay.failures.dead_letters import DeadLetters
from asyncrl.replay.failures.failure_limit import FailureLimit
from asyncrl.replay.held_out import evaluation
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.stages import Stage, Stages
from asyncrl.replay.starts.pacing import Pace
from asyncrl.replay.store.records import (
    THROWN_AWAY,
    UNTRAINED,
    DeadLetter,
    EvaluationRecord,
    GroupRecord,
    TicketRecord,
    TrajectoryRecord,
    TrajectoryState,
    forget,
    shorten,
)
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Purpose

log = logging.getLogger(__name__)

TRAINING, EVALUATION = "t", "e"
"""The queues of tickets that wait for an actor."""


def pending_queue(ticket: str) -> str:
    """The queue in which a ticket waits for an actor."""
    return EVALUATION if is_evaluation(ticket) else TRAINING


class OpenGroups:
    """Operations on whole groups. Each call is part of the caller's transaction."""

    def __init__(
        self,
        settings: ReplaySettings,
        backoff: FailureBackoff,
        limits: Mapping[str, FailureLimit],
        dead_letters: DeadLetters,
        stages: Stages,
        pace: Pace,
    ) -> None:
        self._settings = settings
        self._backoff = backoff
        self._limits = limits
        self._dead_letters = dead_letters
        self._stages = stages
        self._pace = pace
        self._full = Throttled(log, "no tickets: the store is above its high-water mark")
        self._dropped = Throttled(log, "a group is dropped")

    def open_if_admitted(self, tx: Transaction) -> bool:
        """Open the next training group. False if admission, the pace or a full store forbids it. Tasks that must run
        again come before the tasks of the feed."""
        uses = self._settings.group_size * self._settings.admission.uses
        if tx.counter("committed") + uses > self._pace.capacity(tx):
            return False
        if tx.live_bytes() > self._settings.high_water_bytes:
            less = "learner.checkpoint_every or learner.keep_checkpoints"
            if self._settings.keep_steps:
                less = "replay.retention" if self._settings.keeps_all else "replay.retention_steps"
            self._full.say(f"raise replay.max_store_gb, or keep less ({less}), then resume the run")
            return False
        name, row = self._next(tx)
        tx.add("committed", uses)
        demonstrated = bool(self._settings.feed.tasks[row].demonstration)
        members, version = self._settings.group_size + demonstrated, tx.counter("version")
        zeros, unlabelled = [0] * members, [False] * members
        group = GroupRecord(row, Purpose.TRAIN, 0, zeros, unlabelled, demonstrated=demonstrated, begun=version)
        cohorts.begin(tx, version)
        self.open(tx, name, group)
        return True

    def _next(self, tx: Transaction) -> tuple[str, int]:
        """The next group's name, which is unique over all shards, and the row of its task."""
        again = tx.first("again", int)
        if again is None:
            number, row = self._settings.feed.next(tx)
            return feed_group(number), row
        order, row = again
        tx.delete("again", order)
        number = (tx.add("groups_reissued") - 1) * self._settings.shards + self._settings.shard
        return again_group(number), row

    def open(self, tx: Transaction, name: str, group: GroupRecord) -> None:
        """Open a group, and queue a ticket for each member."""
        group.save(tx, name)
        for member, ticket in enumerate(group.ids(name)):
            self._offer(tx, ticket, name, member, urgent=False)

    def _offer(self, tx: Transaction, ticket: str, name: str, member: int, urgent: bool) -> None:
        TicketRecord(name, member).save(tx, ticket)
        tx.append("pending", ticket, pending_queue(ticket), urgent)

    def fail_member(self, tx: Transaction, name: str, member: int, reason: str, scoring: bool = False) -> None:
        """Keep a failed attempt of a member as a dead letter. Then offer a ticket for a new attempt, or drop the group
        if the member has used up its attempts and the group is not worth more."""
        group = GroupRecord.load(tx, name)
        if group is None:
            return
        attempt, row = group.attempts[member], group.row if group.training else -1
        ticket, kind = group.ids(name)[member], SCORINGS if scoring else EPISODES
        tx.afterwards(self._backoff.failed, kind, ticket, reason)
        tx.afterwards(self._limits[kind].failed, ticket, name, reason)
        self._dead_letters.add(tx, ticket, DeadLetter(reason, name, member, attempt, row, scoring))
        if not scoring:
            tx.add("failures")
        group.attempts[member] += 1
        group.save(tx, name)
        used_up = group.attempts[member] >= self._settings.max_attempts
        if used_up and not self._is_worth_more(tx, name, group, member, scoring):
            self._dropped.say(f"{name}, since member {member} failed too often; its last failure: {reason}")
            self.close(
                tx, name, TrajectoryState.DROPPED, f"member {member} failed too often; its last failure: {reason}"
            )
        else:
            self._offer(tx, group.ids(name)[member], name, member, urgent=True)

    def _is_worth_more(self, tx: Transaction, name: str, group: GroupRecord, member: int, scoring: bool) -> bool:
        """True if a member that has used up its attempts gets another one, to save the other episodes of its group.

        The further attempts of all members must be fewer than the episodes that they may save: the delivered ones, or
        the labelled ones if a scoring failed. A demonstration or a greedy member gets no further attempt, since it
        would be played in the same way again."""
        if group.is_demonstration(member) or not self._settings.temperature_of(group, member):
            return False
        further = sum(max(0, failed + 1 - self._settings.max_attempts) for failed in group.attempts[: group.played])
        saved = group.labelled if scoring else [TrajectoryRecord.load(tx, each) is not None for each in group.ids(name)]
        return further < sum(saved[: group.played])

    def close(self, tx: Transaction, name: str, end: TrajectoryState, reason: str = "", keeps: bool = False) -> None:
        """Close a group. Its trajectories get the state `end` and the `reason`, its open tickets end, and the uses that
        the group did not take are free for other groups. Trajectories that arrive later count as late. With `keeps`,
        the data of its trajectories are kept."""
        group = GroupRecord.load(tx, name)
        if group is None:
            return
        tx.delete("groups", name)
        if group.training:
            cohorts.decide(tx, name, group, end)
        self._stages.end(tx, Stage.READY, name, outcome=end)
        if end in THROWN_AWAY:
            self._stages.mark(tx, end, "groups", group=name, reason=shorten(reason))
        for trajectory in group.ids(name):
            self._stages.forget(tx, trajectory)
            self._end(tx, trajectory, end, shorten(reason), keeps)
            self.withdraw(tx, trajectory)
        if group.training and end in THROWN_AWAY:
            tx.add("committed", -group.played * (self._settings.admission.uses - group.sampled))
            tx.add(f"groups_{end}")
        if not group.training and end is TrajectoryState.DROPPED:
            evaluation.count_task(tx, group.version, None)

    def _end(self, tx: Transaction, name: str, end: TrajectoryState, reason: str, keeps: bool) -> None:
        record = TrajectoryRecord.load(tx, name)
        if record is None or record.state is TrajectoryState.DEAD:
            return
        if record.plans:
            # At least one plan contains the trajectory, so it stays planned, but gets no further uses.
            record.state = TrajectoryState.PLANNED
            record.save(tx, name)
            self.release(tx, name, record)
            return
        if end in THROWN_AWAY:
            tx.add("tokens_thrown_away", record.sampled)
            tx.add(f"tokens_{end}", record.sampled)
        tx.add(end)
        record.state, record.reason = end, reason
        record.save(tx, name)
        if self._settings.keeps_all:
            tx.add("kept_untrained")
        elif not keeps:
            forget(tx, name)

    def forget_untrained(self, tx: Transaction) -> None:
        """Delete the untrained trajectories that are stored only because the run kept everything before its restart."""
        if self._settings.keeps_all or not tx.counter("kept_untrained"):
            return
        sampled = {name for _, each in tx.items(EvaluationRecord.table, EvaluationRecord) for name in each.sample}
        for name in [key.decode() for key in tx.keys("data")]:
            state = TrajectoryRecord.of(tx, name).state
            if state in UNTRAINED and name not in sampled and DeadLetter.load(tx, name) is None:
                forget(tx, name)
        tx.set("kept_untrained", 0)

    def release(self, tx: Transaction, name: str, record: TrajectoryRecord) -> None:
        """Count a trajectory as trained, once no later plan can contain it and checkpoints cover all plans that contain
        it."""
        if record.state is TrajectoryState.TRAINED or not is_done(tx, record, record.trained):
            return
        record.state = TrajectoryState.TRAINED
        record.save(tx, name)
        tx.add(TrajectoryState.TRAINED)
        tx.add("tokens_trained", record.trained_tokens)
        if record.last_plan < tx.counter("forgotten_steps"):
            forget(tx, name)

    def withdraw(self, tx: Transaction, ticket: str) -> None:
        """End a ticket, whether an actor holds it or not. Its entry in `pending` stays, and is skipped later."""
        record = TicketRecord.load(tx, ticket)
        if record is not None:
            self.end_ticket(tx, ticket, record)

    def end_ticket(self, tx: Transaction, ticket: str, record: TicketRecord) -> None:
        """End an open ticket, whose record is given."""
        tx.afterwards(self._limits[EPISODES].left, ticket)
        self._stages.end(tx, Stage.TICKET, ticket, worker=record.worker, outcome="ended")
        tx.delete("tickets", ticket)
        if record.worker:
            tx.remove_member("held", record.worker, ticket)


def is_done(tx: Transaction, record: TrajectoryRecord, covered: int) -> bool:
    """True if no later plan can contain a trajectory, and checkpoints cover every plan that contains it. `covered` is
    the number of these plans that checkpoints cover."""
    return covered >= record.plans and GroupRecord.load(tx, record.group) is None
