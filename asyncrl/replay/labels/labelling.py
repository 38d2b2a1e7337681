"""Gives unlabelled trajectories to scorers, and takes their labels.

A trajectory needs one or more kinds of scores, and gets them in a fixed order. One lease covers the next kinds, up to
the first kind that the scorer does not serve. Only the holder of the lease can deliver labels, so labels are taken
exactly once. Labels from any other scorer, or from an earlier process of the same scorer, count as late.

`units.py` defines which trajectories are scored together, as one unit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import RefusedError, StoreError
from asyncrl.ids import is_evaluation
from asyncrl.replay.failures.backoff import SCORINGS, FailureBackoff
from asyncrl.replay.failures.dead_letters import DeadLetters
from asyncrl.replay.failures.failure_limit import FailureLimit
from asyncrl.replay.failures.filter_limit import ABOVE_1, FilterLimit
from asyncrl.replay.groups import OpenGroups
from asyncrl.replay.held_out import evaluation
from asyncrl.replay.labels.label_needs import check_steps, label_needs
from asyncrl.replay.labels.leases import WorkerLeases
from asyncrl.replay.labels.units import Unit, Units, attempts, kinds_together
from asyncrl.replay.messages import Reply
from asyncrl.replay.protocol import FailScoring, LeasedTask, LeaseTrajectories, Leave, WorkerRequest
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.stages import Stage, Stages
from asyncrl.replay.store.records import (
    DeadLetter,
    GroupRecord,
    ReadyGroup,
    TrajectoryRecord,
    TrajectoryState,
    count_dead,
    count_revived,
    shorten,
)
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Labels, process_score
from asyncrl.wire import TASKS_BYTES, Buffer, decode, join_parts, read_labels, split, task_bytes

log = logging.getLogger(__name__)

LEASES_A_REPLY = 1024
TOKENS_A_REPLY = 4 << 20


class Labelling:
    """Handles the requests of scorers. Each call is part of the caller's transaction."""

    def __init__(
        self,
        settings: ReplaySettings,
        groups: OpenGroups,
        scorers: WorkerLeases,
        backoff: FailureBackoff,
        limit: FailureLimit,
        filter_limit: FilterLimit,
        dead_letters: DeadLetters,
        stages: Stages,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._scorers = scorers
        self._backoff = backoff
        self._limit = limit
        self._filter_limit = filter_limit
        self._dead_letters = dead_letters
        self._stages = stages
        self._units = Units(settings)

    def offer(self, tx: Transaction, name: str, record: TrajectoryRecord, group: GroupRecord, urgent: bool) -> None:
        """Queue a trajectory of `group` for the next kind of scores that it needs. For GROUP_KIND, whose scores are of
        whole groups, queue the group once all its members wait for this kind."""
        self._stages.begin(tx, Stage.QUEUED, name)
        record.state = TrajectoryState.WAITING
        record.save(tx, name)
        kind = self._units.next_kind(record)
        if kind != GROUP_KIND:
            tx.append("waiting", name, queue=kind, urgent=urgent)
        elif self._units.waiting_group(tx, record.group):
            tx.append("waiting", record.group, queue=kind, urgent=urgent)

    def lease(self, tx: Transaction, request: LeaseTrajectories) -> Reply | None:
        """Lease either trajectories or whole groups to a scorer. The number of trajectories or groups, their tokens and
        the size of their tasks are limited, but a lease has at least one trajectory or group. `None` if nothing waits
        for a scorer.

        A scorer requests work only when it has no leases left. If the store still has leases of this scorer, a reply
        was lost or an older process of the scorer died. The trajectories of these leases are then leased again. A
        trajectory that was leased before without a result gets its own lease. So an episode that kills its scorer does
        not use up the attempts of other episodes."""
        if self._scorers.has_left(request.worker, request.incarnation):
            return Reply([])
        self._take_back(tx, request.worker, self._scorers.renew(tx, request.worker, request.incarnation))
        # Later kinds come first, to finish partly scored trajectories before new ones.
        kinds = request.serves[::-1]
        groups = self._lease(tx, request, [kind for kind in kinds if kind == GROUP_KIND], request.groups)
        if groups:
            return groups
        wanted = min(request.trajectories, LEASES_A_REPLY)
        return self._lease(tx, request, [kind for kind in kinds if kind != GROUP_KIND], wanted)

    def _lease(self, tx: Transaction, request: LeaseTrajectories, kinds: Sequence[str], wanted: int) -> Reply | None:
        """Lease up to `wanted` units that wait for one of `kinds`."""
        tasks: list[LeasedTask] = []
        frames: list[Buffer] = []
        tokens, room = min(request.tokens, TOKENS_A_REPLY), TASKS_BYTES
        for kind in kinds:
            while wanted > 0 and (first := tx.first("waiting", str, kind)):
                order, name = first
                unit = self._units.waiting(tx, kind, name)
                earlier = attempts(unit)
                tokens -= sum(record.tokens for _, record in unit)
                if tasks and unit and (tokens < 0 or earlier):
                    return Reply(tasks, frames)
                # The entry leaves the queue in any case, even if the unit is given up or no longer waits.
                tx.delete("waiting", order)
                if leased := self._lease_unit(tx, request, unit):
                    wanted -= 1
                    tasks += leased[0]
                    frames += leased[1]
                    room -= sum(task_bytes(each.task) for each in leased[0] if each.task is not None)
                if tasks and unit and (earlier or room <= 0):
                    return Reply(tasks, frames)
        return Reply(tasks, frames) if tasks else None

    def _lease_unit(
        self, tx: Transaction, request: LeaseTrajectories, unit: Unit
    ) -> tuple[list[LeasedTask], list[Buffer]] | None:
        """Lease a unit. `None` if the unit is empty, or is given up because its attempts are used up, or if one of its
        trajectories is given up because its data is damaged."""
        if not unit:
            return None
        if attempts(unit) >= self._settings.max_attempts:
            self._give_up(tx, unit, "its scorers died or stopped responding too often")
            return None
        stored = []
        for name, record in unit:
            try:
                stored.append((tx.present(tx.get_bytes("data", name), "data", name), tx.get_bytes("labels", name)))
            except StoreError as error:
                self._give_up_damaged(tx, name, record, error)
                return None
        group = GroupRecord.of(tx, unit[0][1].group)
        task, needs = self._settings.task(group), self._units.needs(unit[0][1])
        tasks: list[LeasedTask] = []
        frames: list[Buffer] = []
        for (name, record), (data, partial) in zip(unit, stored, strict=True):
            kinds = kinds_together(needs[record.scored :], request.serves)
            record.state, record.leased, record.attempts = TrajectoryState.LEASED, len(kinds), record.attempts + 1
            record.save(tx, name)
            tx.add_member("leased", request.worker, name)
            tx.afterwards(self._limit.began, name)
            self._stages.end(tx, Stage.QUEUED, name)
            self._stages.begin(tx, Stage.SCORING, name)
            final = record.scored + len(kinds) == len(needs)
            tasks.append(LeasedTask(None if tasks else task, kinds, final, partial is not None))
            frames += [data] if partial is None else [data, partial]
        return tasks, frames

    def _take_back(self, tx: Transaction, worker: str, died: bool) -> None:
        """Give a scorer's leases to other scorers. The leases count as attempts only if the scorer `died`, not if a
        reply was lost or the scorer has ended in order."""
        for name in tx.members("leased", worker):
            tx.remove_member("leased", worker, name)
            tx.afterwards(self._limit.left, name)
            self._stages.end(tx, Stage.SCORING, name, worker=worker, outcome="taken back")
            record = TrajectoryRecord.load(tx, name)
            if record is not None and record.state is TrajectoryState.LEASED:
                record.attempts -= not died
                self.offer(tx, name, record, GroupRecord.of(tx, record.group), urgent=True)
                tx.add("leases_redelivered")

    def leave(self, tx: Transaction, request: Leave) -> None:
        """Handle a scorer's orderly end: its leases go to other scorers, and do not count as attempts."""
        if self._scorers.leave(tx, request.worker, request.incarnation):
            self._take_back(tx, request.worker, died=False)

    def expire(self, tx: Transaction) -> None:
        """Give the leases of silent scorers to other scorers."""
        for worker in self._scorers.expire(tx):
            self._take_back(tx, worker, died=True)

    def label(self, tx: Transaction, request: WorkerRequest, labels: Labels, frames: Sequence[Buffer]) -> None:
        """Take the labels of a trajectory, or count them as late. `frames` is their encoding. Raises RefusedError: the
        step scores do not match the trajectory's steps, scores that the algorithm needs are missing, or the trajectory
        was leased with its group."""
        unit = self._end_lease(tx, request, labels.trajectory_id)
        if len(unit) > 1:
            raise RefusedError(
                f"{labels.trajectory_id} was leased with its group: deliver all its members' labels at once"
            )
        if not unit:
            tx.add("late_labels")
            return
        self._take(tx, request.worker, unit, [(labels, join_parts(frames))])

    def label_group(self, tx: Transaction, request: WorkerRequest, stored: Sequence[Buffer]) -> None:
        """Take the labels of all members of a group, or count them as late. `stored` has each member's labels in the
        encoding of the store. Raises RefusedError like `label`, or if they are not the labels of one leased group;
        WireError: they are malformed."""
        labels = [read_labels(decode(split(frame))) for frame in stored]
        names = [each.trajectory_id for each in labels]
        if not names:
            raise RefusedError("a group has at least one member, but no labels came")
        unit = self._end_lease(tx, request, names[0])
        if not unit:
            tx.add("late_labels", len(names))
            return
        if names != [name for name, _ in unit]:
            raise RefusedError(
                f"the labels of {names!r:.200} do not match the leased group {[name for name, _ in unit]!r:.200}: "
                "deliver the labels of all its members in the order of the lease"
            )
        self._take(tx, request.worker, unit, [(each, [frame]) for each, frame in zip(labels, stored, strict=True)])

    def _take(
        self, tx: Transaction, worker: str, unit: Unit, labelled: Sequence[tuple[Labels, Sequence[Buffer]]]
    ) -> None:
        """Store the labels of a unit. `labelled` has for each trajectory of the unit its labels, and the same labels
        encoded for the store, in parts. If a trajectory is damaged, only this one is given up."""
        for (name, record), (labels, _) in zip(unit, labelled, strict=True):
            try:
                check_steps(tx, labels)
            except StoreError as error:
                self._offer_again(tx, [each for each in unit if each[0] != name])
                self._give_up_damaged(tx, name, record, error)
                return
            group = GroupRecord.of(tx, record.group)
            is_last = record.scored + record.leased == len(self._units.needs(record))
            if group.training and is_last and (unmet := self._unmet(tx, labels)):
                raise RefusedError(f"{name} cannot be trained: {unmet}")
        self._scorers.worked(worker)
        tx.afterwards(self._backoff.succeeded, SCORINGS)
        for (name, record), (labels, parts) in zip(unit, labelled, strict=True):
            tx.afterwards(self._limit.succeeded, name)
            tx.put_bytes("labels", name, *parts)
            group = GroupRecord.of(tx, record.group)
            record.scored, record.leased, record.attempts = record.scored + record.leased, 0, 0
            record.reward, record.outcome, record.vote = labels.reward, labels.outcome, labels.vote
            record.process = process_score(labels)
            if record.scored < len(self._units.needs(record)):
                self.offer(tx, name, record, group, urgent=not group.training)
                continue
            record.state = TrajectoryState.LABELLED
            record.save(tx, name)
            tx.add("labelled")
            tx.add("tokens_labelled", record.sampled)
            group.labelled[record.member] = True
            group.save(tx, record.group)
            if all(group.labelled):
                self._complete(tx, record.group, group)

    def _end_lease(self, tx: Transaction, request: WorkerRequest, name: str) -> Unit:
        """End the lease of a trajectory and of its unit. Returns the unit. The unit is empty if the scorer has lost the
        lease, for example because it was restarted."""
        worker = request.worker
        if not self._scorers.holds(tx, worker, request.incarnation):
            return []
        record = self._end_one(tx, worker, name)
        if record is None:
            return []
        ids = self._units.members(tx, name, record)
        held = {name: record, **{each: self._end_one(tx, worker, each) for each in ids if each != name}}
        return [(each, found) for each in ids if (found := held[each]) is not None]

    def _end_one(self, tx: Transaction, worker: str, name: str) -> TrajectoryRecord | None:
        """End the lease of one trajectory. Returns its record, or `None` if the scorer has lost the lease."""
        held = tx.remove_member("leased", worker, name)
        record = TrajectoryRecord.load(tx, name)
        if held and record is not None and record.state is TrajectoryState.LEASED:
            self._stages.end(tx, Stage.SCORING, name, worker=worker)
            return record
        tx.afterwards(self._limit.left, name)
        return None

    def _complete(self, tx: Transaction, name: str, group: GroupRecord) -> None:
        members = [TrajectoryRecord.of(tx, trajectory) for trajectory in group.ids(name)]
        if not group.training:
            evaluation.count_task(tx, group.version, members[0])
            (episode,) = group.ids(name)
            keeps = evaluation.take_sample(tx, self._settings, name, group, episode)
            self._groups.close(tx, name, TrajectoryState.EVALUATED, keeps=keeps)
            return
        played = [member for member in members if not member.is_demonstration]
        outcomes = [member.outcome for member in played]
        self._settings.feed.learned(tx, group.row, float(np.mean(outcomes)))
        if max(outcomes) > 1 and not tx.get("meta", ABOVE_1, bool):
            tx.put("meta", ABOVE_1, True)
            tx.afterwards(self._filter_limit.exceeded)
        reason = self._settings.filters.reason(members, self._named_scores(tx, group.ids(name)))
        if reason is not None:
            tx.afterwards(self._filter_limit.refused, reason, outcomes)
            tx.add(f"filtered/{reason}")
            self._groups.close(tx, name, TrajectoryState.FILTERED, reason)
            return
        tx.afterwards(self._filter_limit.accepted)
        spread = float(np.std([member.reward for member in members]))
        self._stages.begin(tx, Stage.READY, name)
        # A greedy member is not trained, so its tokens do not make a group young enough.
        trained = played[1:] if self._settings.greedy_sibling and not members[0].is_demonstration else played
        oldest, newest = min(member.oldest for member in played), max(member.newest for member in trained or played)
        tx.append("ready", ReadyGroup(name, oldest, spread, newest))

    def _unmet(self, tx: Transaction, labels: Labels) -> str:
        """The reason why an episode with these labels cannot be trained; empty if it can."""
        return label_needs(tx).unmet(labels) or self._settings.filters.unmet(labels)

    def _named_scores(self, tx: Transaction, ids: Sequence[str]) -> list[float]:
        """The score in each member's labels that the filters compare. Empty if they compare none, or a label lacks
        it."""
        name = self._settings.filters.named
        if name is None:
            return []
        stored = (tx.present(tx.get_bytes("labels", each), "labels", each) for each in ids)
        scores = [read_labels(decode(split(each))).extra.get(name) for each in stored]
        known = [score for score in scores if score is not None]
        return known if len(known) == len(scores) else []

    def fail(self, tx: Transaction, request: FailScoring) -> None:
        """Handle a failed scoring of a trajectory, or of the group with which it was leased. The unit is tried again.
        After too many attempts its trajectories become dead letters (kept for inspection, but not trained)."""
        unit = self._end_lease(tx, request, request.id)
        if not unit:
            return
        self._scorers.worked(request.worker)
        tx.add("scoring_failures", len(unit))
        if attempts(unit) >= self._settings.max_attempts:
            self._give_up(tx, unit, request.reason)
            return
        self._offer_again(tx, unit)

    def _offer_again(self, tx: Transaction, unit: Unit) -> None:
        for name, record in unit:
            tx.afterwards(self._limit.left, name)
            self.offer(tx, name, record, GroupRecord.of(tx, record.group), urgent=False)

    def _give_up_damaged(self, tx: Transaction, name: str, record: TrajectoryRecord, error: StoreError) -> None:
        log.error("%s is given up: %s", name, error)
        tx.add("damaged")
        self._give_up(tx, [(name, record)], str(error))

    def _give_up(self, tx: Transaction, unit: Unit, reason: str) -> None:
        """Make each trajectory of a unit a dead letter. A member without attempts left may cause its whole group to be
        dropped (see `OpenGroups.fail_member`)."""
        for name, record in unit:
            tx.afterwards(self._limit.left, name)
            group = GroupRecord.load(tx, record.group)
            if group is None:
                continue
            record.state, record.reason = TrajectoryState.DEAD, shorten(f"scoring: {reason}")
            record.save(tx, name)
            if group.training:
                count_dead(tx, record)
            self._groups.fail_member(tx, record.group, record.member, f"scoring: {reason}", scoring=True)

    def requeue(self, tx: Transaction, ticket: str) -> str:
        """Try a dead letter again. Returns how:

        - "scoring": the episode is stored and its group still waits for a replacement, so the episode is scored again.
        - "task": its task runs again as a new group, before the feed continues.

        Raises RefusedError: there is no such dead letter, or it belongs to a finished evaluation or a skipped plan.
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
        """Queue a stored episode for scoring again, in place of the new episode that was to replace it. Return false,
        and do nothing, if its group is closed, or already has the new episode or a later attempt."""
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
            count_revived(tx, record)
        self.offer(tx, ticket, record, group, urgent=True)
        return True
