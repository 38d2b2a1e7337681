"""Groups: opened when admission allows, completed by replacement tickets, dropped whole when a member is given up.

`committed` counts the trajectories promised to training and not thrown away since; it is what admission bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.replay.admission import Admission
from asyncrl.replay.feed import Feed
from asyncrl.replay.records import Evaluation, Facts, Group, State
from asyncrl.replay.store import Transaction
from asyncrl.types import Purpose, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the replay is told at its start. `batch_size` is in trajectories, `publish_every` in learner steps; a store
    of more than `high_water_bytes` stops new groups until some of it is released. With `greedy_sibling` the first
    member of every group is sampled greedily."""

    admission: Admission
    feed: Feed
    held_out: Sequence[Task]
    group_size: int
    batch_size: int
    publish_every: int
    max_attempts: int
    temperature: float
    high_water_bytes: int
    greedy_sibling: bool = False

    def task(self, group: Group) -> Task:
        return self.feed.tasks[group.row] if group.training else self.held_out[group.row]

    def temperature_of(self, group: Group, member: int) -> float:
        greedy = not group.training or (self.greedy_sibling and member == 0)
        return 0.0 if greedy else self.temperature

    def version_at(self, step: int) -> int:
        """The learner's policy version while it makes step `step`."""
        return step // self.publish_every


class Groups:
    """Operations on whole groups, each within the caller's transaction."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def open_if_admitted(self, tx: Transaction) -> bool:
        """Open the next training group where admission allows; False where it does not."""
        size, rules = self._rules.group_size, self._rules
        if tx.live_bytes() > rules.high_water_bytes:
            return False
        if not rules.admission.admits(size, tx.counter("committed"), tx.counter("version")):
            return False
        row = rules.feed.row(tx.counter("feed_position"))
        number = tx.add("feed_position")
        tx.add("committed", size)
        self._open(tx, f"t{number:09d}", Group(row, Purpose.TRAIN, 0, [0] * size, [False] * size))
        return True

    def open_evaluation(self, tx: Transaction, version: int) -> None:
        """Open one group of one member for each held-out task; a second call does nothing."""
        if Evaluation.load(tx, version) is not None:
            return
        Evaluation(len(self._rules.held_out), 0, 0, 0.0, 0.0).save(tx, version)
        for row in range(len(self._rules.held_out)):
            self._open(tx, f"e{version}-{row:06d}", Group(row, Purpose.EVAL, version, [0], [False]))

    def _open(self, tx: Transaction, name: str, group: Group) -> None:
        group.save(tx, name)
        for member, ticket in enumerate(group.ids(name)):
            self._offer(tx, ticket, name, member, urgent=not group.training)

    def _offer(self, tx: Transaction, ticket: str, name: str, member: int, urgent: bool) -> None:
        tx.put("tickets", ticket, [name, member, ""])
        tx.append("pending", ticket, urgent)

    def fail_member(self, tx: Transaction, name: str, member: int, reason: str) -> None:
        """One attempt of a member is over: bury it, then replace it, or drop its group where attempts are used up."""
        group = Group.load(tx, name)
        if group is None:
            return
        tx.put("dead", group.ids(name)[member], {"reason": reason, "attempt": group.attempts[member]})
        tx.add("failures")
        group.attempts[member] += 1
        group.save(tx, name)
        if group.attempts[member] >= self._rules.max_attempts:
            log.warning("group %s is dropped: member %d failed too often, at last: %s", name, member, reason)
            self.close(tx, name, State.DROPPED)
        else:
            self._offer(tx, group.ids(name)[member], name, member, urgent=True)

    def close(self, tx: Transaction, name: str, fate: State) -> None:
        """End a group: its trajectories reach `fate`, its open tickets end, and its admission is given back if it was
        thrown away. Whatever arrives for it later is counted as late."""
        group = Group.load(tx, name)
        if group is None:
            return
        for trajectory in group.ids(name):
            self._end(tx, trajectory, fate)
            self.withdraw(tx, trajectory)
        if group.training and fate in (State.EVICTED, State.DROPPED):
            tx.add("committed", -len(group.attempts))
            tx.add(f"groups_{fate}")
        if not group.training and fate is State.DROPPED:
            self.count_evaluation(tx, group.version, None)
        tx.delete("groups", name)

    def _end(self, tx: Transaction, trajectory: str, fate: State) -> None:
        facts = Facts.load(tx, trajectory)
        if facts is None or facts.state == State.DEAD:
            return
        if fate in (State.EVICTED, State.DROPPED):
            tx.add("tokens_thrown_away", facts.sampled)
        if fate is not State.PLANNED:
            tx.add(fate)
            self.forget(tx, trajectory)
        facts.state = fate
        facts.save(tx, trajectory)

    def forget(self, tx: Transaction, trajectory: str) -> None:
        """Drop the large parts of a trajectory; its facts stay."""
        tx.delete("data", trajectory)
        tx.delete("labels", trajectory)

    def withdraw(self, tx: Transaction, ticket: str) -> None:
        """End a ticket, wherever it is. Its place in `pending` is skipped when it is reached."""
        entry = tx.get("tickets", ticket)
        if entry is not None:
            tx.delete("tickets", ticket)
            if entry[2]:
                tx.remove_member("held", entry[2], ticket)

    def count_evaluation(self, tx: Transaction, version: int, scores: tuple[float, float] | None) -> None:
        """Count one held-out task as done with (outcome, reward), or as failed."""
        evaluation = Evaluation.load(tx, version)
        if evaluation is None:
            return
        if scores is None:
            evaluation.failed += 1
        else:
            evaluation.outcome += scores[0]
            evaluation.reward += scores[1]
        evaluation.done += 1
        evaluation.save(tx, version)
