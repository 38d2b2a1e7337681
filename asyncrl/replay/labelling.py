"""Unlabelled trajectories out to scorers, labels in.

A trajectory passes through the kinds of scores that its task needs, one after another. A scorer takes as many of them
in one lease as it serves. Only the holder of the lease can label: labels of another scorer are late, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from asyncrl.errors import RefusedError, StoreError
from asyncrl.ids import is_evaluation
from asyncrl.replay import evaluation
from asyncrl.replay.backoff import SCORINGS, FailureBackoff
from asyncrl.replay.dead_letters import DeadLetters
from asyncrl.replay.failure_limit import FailureLimit
from asyncrl.replay.groups import OpenGroups
from asyncrl.replay.leases import WorkerLeases
from asyncrl.replay.protocol import FailScoring, LeasedTask, LeaseTrajectories, Reply
from asyncrl.replay.records import (
    DeadLetter,
    GroupRecord,
    ReadyGroup,
    TrajectoryRecord,
    TrajectoryState,
    shorten,
)
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.transaction import Transaction
from asyncrl.types import Labels, process_score
from asyncrl.wire import TASKS_BYTES, Buffer, decode, join_parts, split, task_bytes

log = logging.getLogger(__name__)

LEASES_A_REPLY = 1024
TOKENS_A_REPLY = 4 << 20


class Labelling:
    """The replay's part towards scorers, each call within the caller's transaction."""

    def __init__(
        self,
        settings: ReplaySettings,
        groups: OpenGroups,
        scorers: WorkerLeases,
        backoff: FailureBackoff,
        limit: FailureLimit,
        dead_letters: DeadLetters,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._scorers = scorers
        self._backoff = backoff
        self._limit = limit
        self._dead_letters = dead_letters

    def offer(self, tx: Transaction, name: str, record: TrajectoryRecord, group: GroupRecord, urgent: bool) -> None:
        """Let a trajectory of `group` wait for the next kind of scores that it needs."""
        record.state = TrajectoryState.WAITING
        record.save(tx, name)
        tx.append("waiting", name, queue=self._needs(group)[record.scored], urgent=urgent)

    def _needs(self, group: GroupRecord) -> tuple[str, ...]:
        return self._settings.needs(self._settings.task(group).data_source)

    def lease(self, tx: Transaction, request: LeaseTrajectories) -> Reply | None:
        """Trajectories to score, bounded by number, tokens and the size of their tasks (but at least one, if any
        waits); None where none waits.

        A scorer that asks has finished or failed all that it leased before. If the store says that it still holds
        some, a reply was lost or an older incarnation died: these are leased again. A trajectory whose earlier lease
        gave no result is leased alone, so that an episode that kills its scorer uses up no other's attempts.
        """
        self._take_back(tx, request.worker, self._scorers.renew(tx, request.worker, request.incarnation))
        tasks: list[LeasedTask] = []
        frames: list[Buffer] = []
        wanted, tokens = min(request.trajectories, LEASES_A_REPLY), min(request.tokens, TOKENS_A_REPLY)
        room = TASKS_BYTES
        # Later kinds first, so that what is begun is finished before something new is begun.
        for kind in reversed(request.serves):
            while len(tasks) < wanted and (first := tx.first("waiting", str, kind)):
                order, name = first
                record = TrajectoryRecord.load(tx, name)
                if record is not None and record.state is TrajectoryState.WAITING:
                    tokens -= record.tokens
                    if tasks and (tokens < 0 or record.attempts):
                        return Reply(tasks, frames)
                    if leased := self._lease_one(tx, request, name, record):
                        tasks.append(leased[0])
                        frames += leased[1]
                        room -= task_bytes(leased[0].task)
                tx.delete("waiting", order)
                if tasks and record is not None and (record.attempts > 1 or room <= 0):
                    return Reply(tasks, frames)
        return Reply(tasks, frames) if tasks else None

    def _lease_one(
        self, tx: Transaction, request: LeaseTrajectories, name: str, record: TrajectoryRecord
    ) -> tuple[LeasedTask, list[Buffer]] | None:
        """Lease a trajectory, or give it up: its attempts are used up, or its data is damaged."""
        record.attempts += 1
        if record.attempts > self._settings.max_attempts:
            self._give_up(tx, name, record, "its scorers died or fell silent too often")
            return None
        group = GroupRecord.of(tx, record.group)
        try:
            frames: list[Buffer] = [tx.present(tx.get_bytes("data", name), "data", name)]
            partial = tx.get_bytes("labels", name)
        except StoreError as error:
            log.error("%s is given up: %s", name, error)
            tx.add("damaged")
            self._give_up(tx, name, record, str(error))
            return None
        if partial is not None:
            frames.append(partial)
        needs = self._needs(group)
        kinds = tuple(takewhile(request.serves.__contains__, needs[record.scored :]))
        record.state, record.leased = TrajectoryState.LEASED, len(kinds)
        record.save(tx, name)
        tx.add_member("leased", request.worker, name)
        tx.afterwards(self._limit.began, name)
        final = record.scored + len(kinds) == len(needs)
        return LeasedTask(self._settings.task(group), kinds, final, partial is not None), frames

    def _take_back(self, tx: Transaction, worker: str, died: bool) -> None:
        """Let others have what a scorer holds. It counts as an attempt only where the scorer died, not where a reply
        was lost."""
        for name in tx.members("leased", worker):
            tx.remove_member("leased", worker, name)
            tx.afterwards(self._limit.left, name)
            record = TrajectoryRecord.load(tx, name)
            if record is not None and record.state is TrajectoryState.LEASED:
                record.attempts -= not died
                self.offer(tx, name, record, GroupRecord.of(tx, record.group), urgent=True)
                tx.add("leases_redelivered")

    def expire(self, tx: Transaction) -> None:
        """Give the leases of silent scorers to others."""
        for worker in self._scorers.expire(tx):
            self._take_back(tx, worker, died=True)

    def label(self, tx: Transaction, worker: str, labels: Labels, frames: Sequence[Buffer]) -> None:
        """Take labels, or count them where they are late; `frames` is their encoding. Raises RefusedError: their
        step scores are not of the trajectory's steps."""
        name = labels.trajectory_id
        record = self._end_lease(tx, worker, name)
        if record is None:
            tx.add("late_labels")
            return
        _check_steps(tx, labels)
        self._scorers.worked(worker)
        tx.afterwards(self._backoff.succeeded, SCORINGS)
        tx.afterwards(self._limit.succeeded, name)
        tx.put_bytes("labels", name, *join_parts(frames))
        group = GroupRecord.of(tx, record.group)
        record.scored, record.leased, record.attempts = record.scored + record.leased, 0, 0
        record.reward, record.outcome, record.vote = labels.reward, labels.outcome, labels.vote
        record.process = process_score(labels)
        if record.scored < len(self._needs(group)):
            self.offer(tx, name, record, group, urgent=not group.training)
            return
        record.state = TrajectoryState.LABELLED
        record.save(tx, name)
        tx.add("labelled")
        group.labelled[record.member] = True
        group.save(tx, record.group)
        if all(group.labelled):
            self._complete(tx, record.group, group)

    def _end_lease(self, tx: Transaction, worker: str, name: str) -> TrajectoryRecord | None:
        """The record of a trajectory that the scorer holds; None where it lost the lease."""
        held = tx.remove_member("leased", worker, name)
        record = TrajectoryRecord.load(tx, name)
        if held and record is not None and record.state is TrajectoryState.LEASED:
            return record
        tx.afterwards(self._limit.left, name)
        return None

    def _complete(self, tx: Transaction, name: str, group: GroupRecord) -> None:
        members = [TrajectoryRecord.of(tx, trajectory) for trajectory in group.ids(name)]
        if not group.training:
            evaluation.count_task(tx, group.version, members[0])
            self._groups.close(tx, name, TrajectoryState.EVALUATED)
            return
        self._settings.feed.learned(tx, group.row, float(np.mean([member.outcome for member in members])))
        reason = self._settings.filters.reason(members)
        if reason is not None:
            tx.add(f"filtered/{reason}")
            self._groups.close(tx, name, TrajectoryState.FILTERED, reason)
            return
        spread = float(np.std([member.reward for member in members]))
        tx.append("ready", ReadyGroup(name, min(member.oldest for member in members), spread))

    def fail(self, tx: Transaction, request: FailScoring) -> None:
        """A scorer gives a trajectory up for now: it is tried again, and becomes a dead letter after too many
        attempts."""
        record = self._end_lease(tx, request.worker, request.id)
        if record is None:
            return
        tx.add("scoring_failures")
        if record.attempts >= self._settings.max_attempts:
            self._give_up(tx, request.id, record, request.reason)
        else:
            tx.afterwards(self._limit.left, request.id)
            self.offer(tx, request.id, record, GroupRecord.of(tx, record.group), urgent=False)

    def _give_up(self, tx: Transaction, name: str, record: TrajectoryRecord, reason: str) -> None:
        record.state, record.reason = TrajectoryState.DEAD, shorten(f"scoring: {reason}")
        record.save(tx, name)
        if GroupRecord.of(tx, record.group).training:
            tx.add(TrajectoryState.DEAD)
        self._groups.fail_member(tx, record.group, record.member, f"scoring: {reason}", scoring=True)

    def requeue(self, tx: Transaction, ticket: str) -> str:
        """Put a dead letter back; returns how.

        "scoring": the episode is stored and its group still waits for a replacement, so it is scored again itself.
        "task": its task runs again as a group of its own, before the feed goes on. Raises RefusedError: there is no
        such dead letter, or its task is a held-out one whose evaluation is over.
        """
        dead = self._dead_letters.get(tx, ticket)
        if dead.scoring and self._reinstate(tx, ticket, dead):
            return "scoring"
        if dead.row < 0:
            held_out = is_evaluation(ticket)
            over = "ran a held-out task, whose evaluation" if held_out else "was in a plan that was skipped: its group"
            raise RefusedError(f"{ticket} {over} is over; discard it")
        tx.append("again", dead.row)
        self._dead_letters.retire(tx, ticket)
        return "task"

    def _reinstate(self, tx: Transaction, ticket: str, dead: DeadLetter) -> bool:
        """Offer a stored episode to scorers again; False where its group no longer waits for its replacement."""
        group = GroupRecord.load(tx, dead.group)
        if group is None or group.attempts[dead.member] != dead.attempt + 1:
            return False
        replacement = group.ids(dead.group)[dead.member]
        if TrajectoryRecord.load(tx, replacement) is not None:
            return False
        self._dead_letters.remove(tx, ticket)
        self._groups.withdraw(tx, replacement)
        group.attempts[dead.member] = dead.attempt
        group.save(tx, dead.group)
        record = TrajectoryRecord.of(tx, ticket)
        record.attempts, record.leased, record.reason = 0, 0, ""
        if group.training:
            tx.add(TrajectoryState.DEAD, -1)
        self.offer(tx, ticket, record, group, urgent=True)
        return True


def _check_steps(tx: Transaction, labels: Labels) -> None:
    if not len(labels.step_ends):
        return
    name = labels.trajectory_id
    data = tx.present(tx.get_bytes("data", name), "data", name)
    ends = {end for _, end in decode(split(data)).body["steps"]}
    unknown = set(labels.step_ends.tolist()) - ends
    if unknown:
        raise RefusedError(
            f"{name} has no steps that end at {sorted(unknown)!r:.200}; its steps end at {sorted(ends)!r:.200}"
        )
