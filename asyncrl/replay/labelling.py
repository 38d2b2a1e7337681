"""Unlabelled trajectories out to scorers, labels in."""

from __future__ import annotations

from asyncrl.replay.groups import Groups, Rules
from asyncrl.replay.records import Facts, Group, State
from asyncrl.replay.store import Transaction
from asyncrl.replay.workers import Workers
from asyncrl.types import Labels, Task


class Labelling:
    """What the replay does for scorers, each call within the caller's transaction."""

    def __init__(self, rules: Rules, groups: Groups, scorers: Workers) -> None:
        self._rules = rules
        self._groups = groups
        self._scorers = scorers

    def lease(
        self, tx: Transaction, worker: str, incarnation: str, trajectories: int, tokens: int
    ) -> list[tuple[Task, bytes]]:
        """Trajectories to score, bounded by number and tokens (but at least one, if any waits), with their tasks.

        A scorer has finished or failed all that it leased before; what it still holds (a lost reply, an older
        incarnation) is given out again.
        """
        self._scorers.seen(tx, worker, incarnation)
        self._take_back(tx, worker)
        leased: list[tuple[Task, bytes]] = []
        while len(leased) < trajectories and (first := tx.first("waiting")):
            order, name = first
            facts = Facts.load(tx, name)
            if facts is not None and facts.state == State.WAITING:
                tokens -= facts.tokens
                if leased and tokens < 0:
                    break
                leased += self._hand_out(tx, worker, name, facts)
            tx.delete("waiting", order)
        return leased

    def _hand_out(self, tx: Transaction, worker: str, name: str, facts: Facts) -> list[tuple[Task, bytes]]:
        facts.attempts += 1
        if facts.attempts > self._rules.max_attempts:
            self._bury(tx, name, facts, "its scorers died or fell silent too often")
            return []
        facts.state = State.LEASED
        facts.save(tx, name)
        tx.add_member("leased", worker, name)
        group, data = Group.load(tx, facts.group), tx.get_bytes("data", name)
        assert group is not None
        assert data is not None
        return [(self._rules.task(group), data)]

    def _take_back(self, tx: Transaction, worker: str) -> None:
        for name in tx.members("leased", worker):
            tx.remove_member("leased", worker, name)
            facts = Facts.load(tx, name)
            if facts is not None and facts.state == State.LEASED:
                facts.state = State.WAITING
                facts.save(tx, name)
                tx.append("waiting", name, urgent=True)
                tx.add("leases_redelivered")

    def expire(self, tx: Transaction) -> None:
        """Give the leases of silent scorers to others."""
        for worker in self._scorers.expire(tx):
            self._take_back(tx, worker)

    def label(self, tx: Transaction, worker: str, labels: Labels, frames: bytes) -> bool:
        """Take labels; `frames` is their joined encoding. False: they came too late, and were counted."""
        name = labels.trajectory_id
        tx.remove_member("leased", worker, name)
        facts = Facts.load(tx, name)
        if facts is None or facts.state not in (State.LEASED, State.WAITING):
            tx.add("late_labels")
            return False
        group = Group.load(tx, facts.group)
        assert group is not None
        facts.state = State.LABELLED
        facts.save(tx, name)
        tx.put_bytes("labels", name, frames)
        tx.add("labelled")
        group.labelled[facts.member] = True
        group.save(tx, facts.group)
        if all(group.labelled):
            self._complete(tx, facts.group, group, labels)
        return True

    def _complete(self, tx: Transaction, name: str, group: Group, labels: Labels) -> None:
        if group.training:
            tx.append("ready", name)
        else:
            self._groups.count_evaluation(tx, group.version, (labels.outcome, labels.reward))
            self._groups.close(tx, name, State.EVALUATED)

    def fail(self, tx: Transaction, worker: str, name: str, reason: str) -> None:
        """A scorer gives a trajectory up for now: it is tried again, and buried after too many attempts."""
        tx.remove_member("leased", worker, name)
        facts = Facts.load(tx, name)
        if facts is None or facts.state != State.LEASED:
            return
        tx.add("scoring_failures")
        if facts.attempts >= self._rules.max_attempts:
            self._bury(tx, name, facts, reason)
        else:
            facts.state = State.WAITING
            facts.save(tx, name)
            tx.append("waiting", name)

    def _bury(self, tx: Transaction, name: str, facts: Facts, reason: str) -> None:
        facts.state = State.DEAD
        facts.save(tx, name)
        group = Group.load(tx, facts.group)
        if group is None or group.training:
            tx.add(State.DEAD)
        self._groups.fail_member(tx, facts.group, facts.member, f"scoring: {reason}")
