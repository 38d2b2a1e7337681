"""Groups: opened when admission allows, completed by replacement tickets, dropped whole when a member is given up.

`committed` counts the uses promised to training and not thrown away since; it is what admission bounds.
"""

from __future__ import annotations

import logging

import numpy as np

from asyncrl.network.throttle import Throttled
from asyncrl.replay.failing import EPISODES, SCORINGS, Failing
from asyncrl.replay.records import THROWN_AWAY, Evaluation, Facts, Group, Letter, State
from asyncrl.replay.rules import Rules
from asyncrl.replay.store import Transaction
from asyncrl.types import Purpose, Trajectory

log = logging.getLogger(__name__)

TRAINING, EVALUATION = "t", "e"
"""The queues of tickets that wait for an actor. Names of an evaluation's groups begin with its own."""


def pending_queue(ticket: str) -> str:
    """The queue in which a ticket waits."""
    return EVALUATION if ticket.startswith(EVALUATION) else TRAINING


class Groups:
    """Operations on whole groups, each within the caller's transaction."""

    def __init__(self, rules: Rules, failing: Failing) -> None:
        self._rules = rules
        self._failing = failing
        self._full = Throttled(log, "no tickets: the store is above its high-water mark")

    def open_if_admitted(self, tx: Transaction) -> bool:
        """Open the next training group where admission allows; False where it does not. Tasks that were put back come
        before those of the feed."""
        size, admission = self._rules.group_size, self._rules.admission
        if not admission.admits(size, tx.counter("committed"), tx.counter("version")):
            return False
        if tx.live_bytes() > self._rules.high_water_bytes:
            self._full.say(
                "raise replay.max_store_gb, or have less kept (replay.retention, learner.checkpoint_every, "
                "learner.keep_checkpoints)"
            )
            return False
        name, row = self._next(tx)
        tx.add("committed", size * admission.uses)
        self._open(tx, name, Group(row, Purpose.TRAIN, 0, [0] * size, [False] * size))
        return True

    def _next(self, tx: Transaction) -> tuple[str, int]:
        """The next group's name, which no other shard gives, and its row."""
        again = tx.first("again")
        if again is None:
            number, row = self._rules.feed.next(tx)
            return f"t{number:09d}", row
        order, row = again
        tx.delete("again", order)
        number = (tx.add("groups_reissued") - 1) * self._rules.shards + self._rules.shard
        return f"r{number:09d}", row

    def open_evaluation(self, tx: Transaction, version: int) -> None:
        """Open one group of one member for each held-out task of this shard; a second call does nothing."""
        if Evaluation.load(tx, version) is not None:
            return
        rows = range(self._rules.shard, len(self._rules.held_out), self._rules.shards)
        Evaluation(len(rows), 0, 0, 0.0, 0.0).save(tx, version)
        for row in rows:
            self._open(tx, f"{EVALUATION}{version}-{row:06d}", Group(row, Purpose.EVAL, version, [0], [False]))

    def _open(self, tx: Transaction, name: str, group: Group) -> None:
        group.save(tx, name)
        for member, ticket in enumerate(group.ids(name)):
            self._offer(tx, ticket, name, member, urgent=False)

    def _offer(self, tx: Transaction, ticket: str, name: str, member: int, urgent: bool) -> None:
        tx.put("tickets", ticket, [name, member, ""])
        tx.append("pending", ticket, pending_queue(ticket), urgent)

    def fail_member(self, tx: Transaction, name: str, member: int, reason: str, scoring: bool = False) -> None:
        """One attempt of a member is over: bury it, then replace it, or drop its group where attempts are used up."""
        group = Group.load(tx, name)
        if group is None:
            return
        attempt, row = group.attempts[member], group.row if group.training else -1
        self._failing.failed(SCORINGS if scoring else EPISODES, reason)
        self.bury(tx, group.ids(name)[member], Letter(reason, name, member, attempt, row, scoring))
        tx.add("failures")
        group.attempts[member] += 1
        group.save(tx, name)
        if group.attempts[member] >= self._rules.max_attempts:
            log.warning("group %s is dropped: member %d failed too often, at last: %s", name, member, reason)
            self.close(tx, name, State.DROPPED)
        else:
            self._offer(tx, group.ids(name)[member], name, member, urgent=True)

    def bury(self, tx: Transaction, ticket: str, letter: Letter) -> None:
        """Keep the letter, with the episode if it is there; the oldest letters go where there are too many."""
        letter.order = tx.append("burials", ticket)
        letter.size = len(letter.reason) + tx.size("data", ticket) + tx.size("labels", ticket)
        letter.save(tx, ticket)
        tx.add("dead_letter_bytes", letter.size)
        while tx.count("dead") > self._rules.max_letters or (
            tx.counter("dead_letter_bytes") > self._rules.max_letter_bytes
        ):
            oldest = tx.first("burials")
            if oldest is None:
                return
            self.remove_letter(tx, oldest[1])
            self.forget(tx, oldest[1])
            tx.add("dead_letters_dropped")

    def remove_letter(self, tx: Transaction, ticket: str) -> None:
        """Forget that an attempt was given up, but not its episode."""
        letter = tx.present(Letter.load(tx, ticket), "dead", ticket)
        tx.delete("dead", ticket)
        tx.delete("burials", letter.order)
        tx.add("dead_letter_bytes", -letter.size)

    def close(self, tx: Transaction, name: str, fate: State) -> None:
        """End a group: its trajectories reach `fate`, its open tickets end, and what admission promised it and was not
        used is given back. Whatever arrives for it later is counted as late."""
        group = Group.load(tx, name)
        if group is None:
            return
        tx.delete("groups", name)
        for trajectory in group.ids(name):
            self._end(tx, trajectory, fate)
            self.withdraw(tx, trajectory)
        if group.training and fate in THROWN_AWAY:
            tx.add("committed", -len(group.attempts) * (self._rules.admission.uses - group.sampled))
            tx.add(f"groups_{fate}")
        if not group.training and fate is State.DROPPED:
            self.count_evaluation(tx, group.version, None)

    def _end(self, tx: Transaction, trajectory: str, fate: State) -> None:
        facts = Facts.load(tx, trajectory)
        if facts is None or facts.state == State.DEAD:
            return
        if facts.plans:
            # It was used: what ends is that it may be used again.
            facts.state = State.PLANNED
            facts.save(tx, trajectory)
            self.release(tx, trajectory, facts)
            return
        if fate in THROWN_AWAY:
            tx.add("tokens_thrown_away", facts.sampled)
        tx.add(fate)
        facts.state = fate
        facts.save(tx, trajectory)
        self.forget(tx, trajectory)

    def release(self, tx: Transaction, trajectory: str, facts: Facts) -> None:
        """Count a trajectory as trained, once no plan will name it any more and checkpoints cover those that do."""
        if facts.state == State.TRAINED or facts.trained < facts.plans or Group.load(tx, facts.group) is not None:
            return
        facts.state = State.TRAINED
        facts.save(tx, trajectory)
        tx.add(State.TRAINED)
        if facts.last_plan < tx.counter("forgotten_steps"):
            self.forget(tx, trajectory)

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

    def count_evaluated_tokens(self, tx: Transaction, version: int, trajectory: Trajectory) -> None:
        """Count by which versions an episode of the evaluation of `version` was sampled."""
        evaluation = Evaluation.load(tx, version)
        if evaluation is None:
            return
        evaluation.tokens += trajectory.sampled_tokens
        evaluation.newer_tokens += int(np.count_nonzero(trajectory.versions > version))
        evaluation.newest = max(evaluation.newest, int(trajectory.versions.max()))
        evaluation.save(tx, version)

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
