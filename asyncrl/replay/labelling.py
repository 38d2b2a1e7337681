"""Unlabelled trajectories out to scorers, labels in.

A trajectory passes through the kinds of scores that its task needs, one after another; a scorer takes as many of them
in one lease as it serves. Only who holds the lease can label: whoever lost it comes too late, and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.failing import SCORINGS, Failing
from asyncrl.replay.groups import Groups
from asyncrl.replay.records import Facts, Group, State
from asyncrl.replay.rules import Rules
from asyncrl.replay.store import Transaction
from asyncrl.replay.workers import Workers
from asyncrl.types import Labels, Task
from asyncrl.wire import TASKS_BYTES, Buffer, decode, split, task_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leased:
    """A trajectory handed out for `kinds` of scores: its frames, and those of what earlier kinds found."""

    task: Task
    frames: Buffer
    partial: Buffer | None
    kinds: tuple[str, ...]
    final: bool


class Labelling:
    """What the replay does for scorers, each call within the caller's transaction."""

    def __init__(self, rules: Rules, groups: Groups, scorers: Workers, failing: Failing) -> None:
        self._rules = rules
        self._groups = groups
        self._scorers = scorers
        self._failing = failing

    def offer(self, tx: Transaction, name: str, facts: Facts, group: Group, urgent: bool) -> None:
        """Let a trajectory of `group` wait for the next kind of scores that it needs."""
        facts.state = State.WAITING
        facts.save(tx, name)
        kinds = self._needs(group)
        tx.append("waiting", name, queue=kinds[facts.scored], urgent=urgent)

    def _needs(self, group: Group) -> tuple[str, ...]:
        return self._rules.needs(self._rules.task(group).data_source)

    def lease(
        self, tx: Transaction, worker: str, incarnation: str, serves: Sequence[str], trajectories: int, tokens: int
    ) -> list[Leased]:
        """Trajectories to score, bounded by number, tokens and the size of their tasks (but at least one,
        if any waits).

        A scorer has finished or failed all that it leased before; what it still holds (a lost reply, an older
        incarnation) is given out again. What was leased before in vain comes alone, so that an episode that kills its
        scorer takes no other's attempts along.
        """
        died = self._scorers.seen(tx, worker, incarnation)
        self._take_back(tx, worker, died)
        leased: list[Leased] = []
        room = TASKS_BYTES
        # Later kinds first: what is begun is finished before something new is begun.
        for kind in reversed(serves):
            while len(leased) < trajectories and (first := tx.first("waiting", kind)):
                order, name = first
                facts = Facts.load(tx, name)
                if facts is not None and facts.state == State.WAITING:
                    tokens -= facts.tokens
                    if leased and (tokens < 0 or facts.attempts):
                        return leased
                    given = self._hand_out(tx, worker, name, facts, serves)
                    leased += given
                    room -= sum(task_bytes(each.task) for each in given)
                tx.delete("waiting", order)
                if leased and facts is not None and (facts.attempts > 1 or room <= 0):
                    return leased
        return leased

    def _hand_out(self, tx: Transaction, worker: str, name: str, facts: Facts, serves: Sequence[str]) -> list[Leased]:
        facts.attempts += 1
        if facts.attempts > self._rules.max_attempts:
            self._bury(tx, name, facts, "its scorers died or fell silent too often")
            return []
        group = Group.of(tx, facts.group)
        try:
            data, partial = tx.present(tx.get_bytes("data", name), "data", name), tx.get_bytes("labels", name)
        except StoreError as error:
            log.error("%s is given up: %s", name, error)
            tx.add("damaged")
            self._bury(tx, name, facts, str(error))
            return []
        needs = self._needs(group)
        kinds = tuple(takewhile(serves.__contains__, needs[facts.scored :]))
        facts.state, facts.leased = State.LEASED, len(kinds)
        facts.save(tx, name)
        tx.add_member("leased", worker, name)
        return [Leased(self._rules.task(group), data, partial, kinds, facts.scored + len(kinds) == len(needs))]

    def _take_back(self, tx: Transaction, worker: str, died: bool) -> None:
        """Let others have what a scorer holds; it is an attempt only where the scorer died, not where its reply was
        lost on the way."""
        for name in tx.members("leased", worker):
            tx.remove_member("leased", worker, name)
            facts = Facts.load(tx, name)
            if facts is not None and facts.state == State.LEASED:
                facts.attempts -= not died
                self.offer(tx, name, facts, Group.of(tx, facts.group), urgent=True)
                tx.add("leases_redelivered")

    def expire(self, tx: Transaction) -> None:
        """Give the leases of silent scorers to others."""
        for worker in self._scorers.expire(tx):
            self._take_back(tx, worker, died=True)

    def label(self, tx: Transaction, worker: str, labels: Labels, frames: bytes) -> bool:
        """Take labels; `frames` is their joined encoding. False: they came too late, and were counted. Raises
        RefusedError: their step scores are not of the trajectory's steps."""
        name = labels.trajectory_id
        held = tx.remove_member("leased", worker, name)
        facts = Facts.load(tx, name)
        if not held or facts is None or facts.state != State.LEASED:
            tx.add("late_labels")
            return False
        _check_steps(tx, labels)
        self._scorers.worked(worker)
        self._failing.succeeded(SCORINGS)
        tx.put_bytes("labels", name, frames)
        group = Group.of(tx, facts.group)
        facts.scored, facts.leased, facts.attempts = facts.scored + facts.leased, 0, 0
        if facts.scored < len(self._needs(group)):
            self.offer(tx, name, facts, group, urgent=not group.training)
            return True
        facts.state, facts.reward, facts.outcome = State.LABELLED, labels.reward, labels.outcome
        facts.save(tx, name)
        tx.add("labelled")
        group.labelled[facts.member] = True
        group.save(tx, facts.group)
        if all(group.labelled):
            self._complete(tx, facts.group, group)
        return True

    def _complete(self, tx: Transaction, name: str, group: Group) -> None:
        members = [Facts.of(tx, trajectory) for trajectory in group.ids(name)]
        if not group.training:
            self._groups.count_evaluation(tx, group.version, (members[0].outcome, members[0].reward))
            self._groups.close(tx, name, State.EVALUATED)
            return
        self._rules.feed.learned(tx, group.row, float(np.mean([member.outcome for member in members])))
        reason = self._rules.filters.reason(members)
        if reason is not None:
            tx.add(f"filtered/{reason}")
            self._groups.close(tx, name, State.FILTERED)
            return
        spread = float(np.std([member.reward for member in members]))
        tx.append("ready", [name, min(member.oldest for member in members), spread])

    def fail(self, tx: Transaction, worker: str, name: str, reason: str) -> None:
        """A scorer gives a trajectory up for now: it is tried again, and buried after too many attempts."""
        held = tx.remove_member("leased", worker, name)
        facts = Facts.load(tx, name)
        if not held or facts is None or facts.state != State.LEASED:
            return
        tx.add("scoring_failures")
        if facts.attempts >= self._rules.max_attempts:
            self._bury(tx, name, facts, reason)
        else:
            self.offer(tx, name, facts, Group.of(tx, facts.group), urgent=False)

    def _bury(self, tx: Transaction, name: str, facts: Facts, reason: str) -> None:
        facts.state = State.DEAD
        facts.save(tx, name)
        if Group.of(tx, facts.group).training:
            tx.add(State.DEAD)
        self._groups.fail_member(tx, facts.group, facts.member, f"scoring: {reason}", scoring=True)


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
