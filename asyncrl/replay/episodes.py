"""Tickets out, trajectories in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from asyncrl.errors import BusyError, RefusedError, StoreError
from asyncrl.replay.failing import EPISODES, Failing
from asyncrl.replay.groups import EVALUATION, TRAINING, Groups, pending_queue
from asyncrl.replay.labelling import Labelling
from asyncrl.replay.records import Facts, Group
from asyncrl.replay.rules import Rules
from asyncrl.replay.store import Transaction
from asyncrl.replay.workers import Workers
from asyncrl.types import Purpose, Ticket, Trajectory
from asyncrl.wire import TASKS_BYTES, Buffer, task_bytes

log = logging.getLogger(__name__)


class Episodes:
    """What the replay does for actors, each call within the caller's transaction."""

    def __init__(
        self,
        rules: Rules,
        groups: Groups,
        labelling: Labelling,
        actors: Workers,
        failing: Failing,
        clock: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._groups = groups
        self._labelling = labelling
        self._actors = actors
        self._failing = failing
        self._clock = clock
        self._given: dict[str, float] = {}

    def adopt(self, tx: Transaction) -> None:
        """Take up what an earlier process gave out: every actor has a fresh lease, every ticket its full time."""
        self._actors.adopt(tx)
        now = self._clock()
        self._given = {name: now for worker in tx.keys("held") for name in tx.members("held", worker)}

    def not_begun(self, names: Sequence[str]) -> None:
        """Tickets whose episodes do not run now: their time begins anew."""
        self._given |= {name: self._clock() for name in names if name in self._given}

    def tickets(
        self, tx: Transaction, worker: str, incarnation: str, holding: Sequence[str], want: int
    ) -> list[Ticket]:
        """Up to `want` tickets for an actor that works on `holding`.

        The call renews the actor's lease. What the store says it holds but it does not (a lost reply) comes first, then
        evaluations; but half of its places are for training, as long as there is any to do. While everything fails,
        new ones are few. Where tasks are so large that a reply has no room for all, the rest comes with the next.
        """
        if self._actors.seen(tx, worker, incarnation):
            self._take_back(tx, worker)
        lost = sorted(set(tx.members("held", worker)).difference(holding))
        issued: list[Ticket] = []
        room = TASKS_BYTES
        for name in lost[: max(want, 0)]:
            issued.append(self._ticket(tx, name))
            if (room := room - task_bytes(issued[-1].task)) <= 0:
                return issued
        at_work = [*holding, *(ticket.id for ticket in issued)]
        places, evaluations = len(holding) + want, sum(pending_queue(name) == EVALUATION for name in at_work)
        again, allowed = len(issued), self._failing.allowed(max(0, want - len(issued)))
        while len(issued) < again + allowed:
            ticket = self._issue(tx, worker, evaluations_last=2 * evaluations >= places)
            if ticket is None:
                break
            issued.append(ticket)
            evaluations += ticket.purpose is Purpose.EVAL
            if (room := room - task_bytes(ticket.task)) <= 0:
                break
        if len(issued) > again:
            self._failing.issued()
        return issued

    def _issue(self, tx: Transaction, worker: str, evaluations_last: bool) -> Ticket | None:
        queues = (TRAINING, EVALUATION) if evaluations_last else (EVALUATION, TRAINING)
        found = (self._next_of(tx, queue, worker) for queue in queues)
        return next((ticket for ticket in found if ticket is not None), None)

    def _next_of(self, tx: Transaction, queue: str, worker: str) -> Ticket | None:
        while True:
            first = tx.first("pending", queue)
            if first is None:
                if queue == EVALUATION or not self._groups.open_if_admitted(tx):
                    return None
                continue
            order, name = first
            tx.delete("pending", order)
            entry = tx.get("tickets", name)
            # A ticket that was withdrawn and offered anew stands in the queue twice: the second time somebody holds it.
            if entry is not None and not entry[2]:
                tx.put("tickets", name, [entry[0], entry[1], worker])
                tx.add_member("held", worker, name)
                self._given[name] = self._clock()
                return self._ticket(tx, name)

    def _ticket(self, tx: Transaction, name: str) -> Ticket:
        group_id, member, _ = tx.get("tickets", name)
        group = Group.of(tx, group_id)
        return Ticket(
            id=name,
            task=self._rules.task(group),
            group_id=group_id,
            member=member,
            purpose=Purpose(group.purpose),
            temperature=self._rules.temperature_of(group, member),
            min_version=self._min_version(tx) if group.training else group.version,
        )

    def _min_version(self, tx: Transaction) -> int:
        return max(0, self._rules.oldest_allowed(tx.counter("version")))

    def _take_back(self, tx: Transaction, worker: str) -> None:
        for name in tx.members("held", worker):
            group, member, _ = tx.get("tickets", name)
            tx.put("tickets", name, [group, member, ""])
            tx.remove_member("held", worker, name)
            self._given.pop(name, None)
            tx.append("pending", name, pending_queue(name), urgent=True)
            tx.add("tickets_redelivered")

    def expire(self, tx: Transaction) -> None:
        """Give the tickets of silent actors to others; end those that were held for too long."""
        for worker in self._actors.expire(tx):
            self._take_back(tx, worker)
        horizon = self._clock() - self._rules.longest_episode_s
        for name in [name for name, when in self._given.items() if when < horizon]:
            del self._given[name]
            if tx.get("tickets", name) is not None:
                self.fail(tx, name, "its actor held it for longer than actor.episode_timeout_s")

    def put(self, tx: Transaction, trajectory: Trajectory, frames: bytes) -> str:
        """Take a trajectory; `frames` is its joined encoding. Returns stored, duplicate, or late (its ticket has ended,
        so it is counted and not kept). Raises RefusedError: it does not fit its ticket; BusyError: there is no room."""
        if Facts.load(tx, trajectory.id) is not None:
            tx.add("duplicates")
            return "duplicate"
        entry = tx.get("tickets", trajectory.id)
        group = None if entry is None else Group.load(tx, entry[0])
        if group is None:
            tx.add("late")
            tx.add("tokens_thrown_away", trajectory.sampled_tokens)
            return "late"
        if [trajectory.group_id, trajectory.member] != entry[:2]:
            raise RefusedError(f"{trajectory.id} says member {trajectory.member} of {trajectory.group_id}, not {entry}")
        self._check(tx, trajectory)
        if tx.table_bytes("data") > self._rules.full_bytes:
            raise BusyError("the store is full until the learner releases what it has trained; see replay.max_store_gb")
        facts = Facts(
            trajectory.group_id,
            trajectory.member,
            len(trajectory),
            trajectory.sampled_tokens,
            trajectory.oldest_version,
        )
        self._failing.succeeded(EPISODES)
        tx.put_bytes("data", trajectory.id, frames)
        self._labelling.offer(tx, trajectory.id, facts, group, urgent=not group.training)
        tx.add("accepted" if group.training else "accepted_evaluations")
        if not group.training:
            self._groups.count_evaluated_tokens(tx, group.version, trajectory)
        self._groups.withdraw(tx, trajectory.id)
        self._given.pop(trajectory.id, None)
        return "stored"

    def _check(self, tx: Transaction, trajectory: Trajectory) -> None:
        """Raises RefusedError: the learner could not train it, and would fail on its plan for ever."""
        rules, name, newest = self._rules, trajectory.id, int(trajectory.versions.max())
        if len(trajectory) > rules.max_tokens:
            raise RefusedError(f"{name} has {len(trajectory)} tokens; actor.max_tokens allows {rules.max_tokens:.0f}")
        if rules.vocabulary is not None and (largest := int(trajectory.tokens.max())) >= rules.vocabulary:
            raise RefusedError(
                f"{name} has the token id {largest}, but the policy's embedding has {rules.vocabulary} rows: "
                "the tokenizer of its actor is not the policy's"
            )
        # Engines serve a version before the learner has told the replay of it, and no more than that one.
        if newest > tx.counter("version") + 1:
            raise RefusedError(f"{name} was sampled by version {newest}, the newest is {tx.counter('version')}")

    def fail(self, tx: Transaction, ticket: str, reason: str) -> None:
        """An actor gives an episode up."""
        entry = tx.get("tickets", ticket)
        if entry is None:
            tx.add("late")
            return
        self._groups.withdraw(tx, ticket)
        self._groups.fail_member(tx, entry[0], entry[1], reason)

    def fetch(self, tx: Transaction, table: str, names: Sequence[str]) -> list[Buffer]:
        """The stored frames of trajectories (`data`) or their labels (`labels`). Raises RefusedError: one is gone
        or damaged."""
        values: list[Buffer] = []
        for name in names:
            try:
                value = tx.get_bytes(table, name)
            except StoreError as error:
                log.error("%s cannot be given out: %s", name, error)
                raise RefusedError(str(error)) from error
            if value is None:
                facts = Facts.load(tx, name)
                raise RefusedError(f"the {table} of {name} are not there: {facts.state if facts else 'it is unknown'}")
            values.append(value)
        return values
