"""The replay as a set of requests: each message kind to one operation within a transaction.

Every operation may be asked again after a lost reply without doing harm. `None` means "nothing yet": the server asks
again when the state has changed, until the requester's patience is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay import report
from asyncrl.replay.episodes import Episodes
from asyncrl.replay.failing import Failing
from asyncrl.replay.groups import Groups
from asyncrl.replay.labelling import Labelling
from asyncrl.replay.letters import Letters
from asyncrl.replay.planning import Planning
from asyncrl.replay.readers import Readers
from asyncrl.replay.requests import check
from asyncrl.replay.rules import Rules
from asyncrl.replay.store import Transaction
from asyncrl.replay.waits import Waits
from asyncrl.replay.workers import Workers
from asyncrl.types import RunIdentity
from asyncrl.wire import (
    Buffer,
    Message,
    check_run,
    encode,
    join,
    plan_body,
    read_labels,
    read_trajectory,
    task_body,
    ticket_body,
)

TICKETS_A_REPLY = 256
LEASES_A_REPLY = 1024
TOKENS_A_REPLY = 4 << 20

QUESTIONS = ("status", "audit")
"""Requests that change nothing."""

Handler = Callable[[Transaction, Message], Message | None]


class Service:
    """All of the replay but its sockets. `clock` gives monotonic seconds, `strangers` how many were turned away.

    With `run`, the store must be that run's, and so must be whoever gives orders; anybody may ask QUESTIONS.
    """

    def __init__(
        self,
        rules: Rules,
        lease_s: float,
        clock: Callable[[], float],
        strangers: Callable[[], int] = lambda: 0,
        run: RunIdentity | None = None,
    ) -> None:
        self.failing = Failing(clock)
        groups = Groups(rules, self.failing)
        self._rules = rules
        self._strangers = strangers
        self._run = run
        self._groups = groups
        self._actors = Workers("actors", lease_s, clock)
        self._scorers = Workers("scorers", lease_s, clock)
        self.labelling = Labelling(rules, groups, self._scorers, self.failing)
        self.episodes = Episodes(rules, groups, self.labelling, self._actors, self.failing, clock)
        self.letters = Letters(groups, self.labelling)
        self.planning = Planning(rules, groups)
        self._waits = Waits(clock)
        self.readers = Readers(clock)
        self._handlers: dict[str, Handler] = {
            "tickets": self._tickets,
            "trajectory": self._trajectory,
            "failed": self._failed,
            "lease": self._lease,
            "renew": self._renew,
            "labels": self._labels,
            "scoring-failed": self._scoring_failed,
            "plan": self._plan,
            "fetch": self._fetch,
            "published": self._published,
            "checkpointed": self._checkpointed,
            "evaluate": self._evaluate,
            "evaluation": self._evaluation,
            "status": self._status,
            "audit": self._audit,
            "requeue": self._requeue,
            "discard": self._discard,
            "skip-plan": self._skip_plan,
        }

    def start(self, tx: Transaction) -> None:
        """Take up what an earlier process left: everyone who held work gets a fresh lease.

        Raises StoreError: the store was imported, so it has trajectories and plans, but no run to go on with; or it is
        another run's.
        """
        if tx.counter("imported"):
            raise StoreError(
                "this store was imported: read it, or train from it by replay.source=; it cannot be served"
            )
        self._pin(tx)
        self.episodes.adopt(tx)
        self._scorers.adopt(tx)

    def _pin(self, tx: Transaction) -> None:
        """Write down whose the store is and what its records rest on, or compare with what an earlier process wrote."""
        if self._run is not None:
            owner = tx.run
            if owner is None:
                tx.put("meta", "run", [self._run.name, self._run.id])
            elif owner != self._run:
                raise StoreError(
                    f"this store belongs to run {owner}, not to {self._run}: serve it with that run's name and folder, "
                    "whose file `identity` holds the id"
                )
        before, now = tx.get("meta", "pinned"), self._rules.pinned()
        if before is None:
            tx.put("meta", "pinned", now)
        elif before != now:
            changed = ", ".join(
                f"{name} was {before.get(name)} and is {now[name]}" for name in now if before.get(name) != now[name]
            )
            raise StoreError(f"this store belongs to a run with another configuration: {changed}; set it back")

    def tick(self, tx: Transaction) -> None:
        """What time alone brings about: leases that end, the learner's waiting, and readers that died or stay."""
        self.readers.look(tx)
        self.episodes.expire(tx)
        self.labelling.expire(tx)
        self._waits.look(lambda: self.planning.missing(tx))

    def report(self, tx: Transaction) -> dict[str, float]:
        """Every number there is: counters, depths, bytes, who is at work, and what the learner has waited for."""
        waits = {f"learner_waited_for_{cause}_s": seconds for cause, seconds in self._waits.seconds.items()}
        workers = {"actors": self._actors.count, "scorers": self._scorers.count, "strangers": self._strangers()}
        readers = {"dead_readers": self.readers.dead, "lingering_readers": len(self.readers.lingering())}
        return {**report.status(tx, self._rules), **workers, **readers, **waits}

    def handle(self, tx: Transaction, request: Message) -> Message | None:
        """The reply to a request; None where there is nothing to answer yet.

        Raises AsyncrlError where the request is refused; nothing of it takes effect then.
        """
        check(request.kind, request.body)
        self._require_own_run(request)
        handler = self._handlers.get(request.kind)
        if handler is None:
            raise RefusedError(f"unknown request {request.kind!r:.50}; known are {', '.join(self._handlers)}")
        try:
            return handler(tx, request)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise RefusedError(f"malformed request {request.kind!r}: {type(error).__name__}: {error}") from error

    def _require_own_run(self, request: Message) -> None:
        if self._run is None or (request.kind in QUESTIONS and "run" not in request.body):
            return
        check_run(request, self._run, "replay", "network.replay_port")

    def _tickets(self, tx: Transaction, request: Message) -> Message | None:
        body = request.body
        worker, incarnation, holding = str(body["worker"]), str(body["incarnation"]), list(body["holding"])
        want = min(int(body["want"]), TICKETS_A_REPLY)
        self.episodes.not_begun(body["waiting"])
        tickets = self.episodes.tickets(tx, worker, incarnation, holding, want)
        if not tickets and want > 0:
            return None
        return _reply(request, tickets=[ticket_body(ticket) for ticket in tickets])

    def _trajectory(self, tx: Transaction, request: Message) -> Message:
        trajectory = read_trajectory(request)
        return _reply(request, result=self.episodes.put(tx, trajectory, join(request.frames or encode(request))))

    def _failed(self, tx: Transaction, request: Message) -> Message:
        self.episodes.fail(tx, str(request.body["ticket"]), str(request.body["reason"]))
        return _reply(request)

    def _lease(self, tx: Transaction, request: Message) -> Message | None:
        body = request.body
        worker, incarnation, serves = (
            str(body["worker"]),
            str(body["incarnation"]),
            [str(each) for each in body["serves"]],
        )
        trajectories = min(int(body["trajectories"]), LEASES_A_REPLY)
        tokens = min(int(body["tokens"]), TOKENS_A_REPLY)
        leased = self.labelling.lease(tx, worker, incarnation, serves, trajectories, tokens)
        if not leased:
            return None
        heads = [[task_body(each.task), each.kinds, each.final, each.partial is not None] for each in leased]
        values = [value for each in leased for value in (each.frames, each.partial) if value is not None]
        return _frames(request, values, leases=heads)

    def _renew(self, tx: Transaction, request: Message) -> Message:
        self._scorers.touch(str(request.body["worker"]))
        return _reply(request)

    def _labels(self, tx: Transaction, request: Message) -> Message:
        labels, frames = read_labels(request), join(request.frames or encode(request))
        return _reply(request, stored=self.labelling.label(tx, str(request.body["worker"]), labels, frames))

    def _scoring_failed(self, tx: Transaction, request: Message) -> Message:
        body = request.body
        self.labelling.fail(tx, str(body["worker"]), str(body["id"]), str(body["reason"]))
        return _reply(request)

    def _plan(self, tx: Transaction, request: Message) -> Message | None:
        plan = self.planning.plan(tx, int(request.body["step"]))
        self._waits.asked(plan is not None, lambda: self.planning.missing(tx))
        return None if plan is None else _reply(request, plan=plan_body(plan))

    def _fetch(self, tx: Transaction, request: Message) -> Message:
        table = str(request.body["table"])
        if table not in ("data", "labels"):
            raise RefusedError(f"fetch takes from data or labels, not from {table!r}")
        return _frames(request, self.episodes.fetch(tx, table, list(request.body["ids"])))

    def _published(self, tx: Transaction, request: Message) -> Message:
        self.planning.published(tx, int(request.body["version"]))
        return _reply(request)

    def _checkpointed(self, tx: Transaction, request: Message) -> Message:
        self.planning.checkpointed(tx, int(request.body["steps"]), int(request.body["kept"]))
        return _reply(request)

    def _evaluate(self, tx: Transaction, request: Message) -> Message:
        if not len(self._rules.held_out):
            raise RefusedError("there is nothing to evaluate on: set data.eval to a Parquet file of held-out tasks")
        self._groups.open_evaluation(tx, int(request.body["version"]))
        return _reply(request)

    def _evaluation(self, tx: Transaction, request: Message) -> Message | None:
        result = report.evaluation(tx, int(request.body["version"]))
        return None if result is None and request.body["wait"] else _reply(request, result=result)

    def _status(self, tx: Transaction, request: Message) -> Message:
        silence = {"actors": self._actors.silence(), "scorers": self._scorers.silence()}
        readers = [asdict(each) for each in self.readers.lingering()]
        status = {**self.report(tx), "identity": tx.identity, "silence_s": silence, "readers": readers}
        status["failing"] = self.failing.text()
        return _reply(request, status=status)

    def _audit(self, tx: Transaction, request: Message) -> Message:
        return _reply(request, audit=report.audit(tx, self._rules.admission.uses))

    def _requeue(self, tx: Transaction, request: Message) -> Message:
        return _reply(request, back=self.letters.requeue(tx, str(request.body["ticket"])))

    def _discard(self, tx: Transaction, request: Message) -> Message:
        self.letters.discard(tx, str(request.body["ticket"]))
        return _reply(request)

    def _skip_plan(self, tx: Transaction, request: Message) -> Message:
        dead = self.planning.skip(tx, int(request.body["step"]), str(request.body["reason"]))
        return _reply(request, dead=dead)


def _reply(request: Message, **body: Any) -> Message:
    return Message("ok", request.sequence, body)


def _frames(request: Message, values: Sequence[Buffer], **body: Any) -> Message:
    arrays = {str(index): np.frombuffer(value, np.uint8) for index, value in enumerate(values)}
    return Message("ok", request.sequence, body, arrays)
