"""One commit of the replay: applies a batch of requests in one transaction, and commits before any reply is sent.

Since ids make repeated requests harmless, each request takes effect exactly once. A request that is refused or meets an
internal error has no effect: it is counted, and the answer has the reason. A request that cannot be answered yet waits
until the state changes, for at most PATIENCE_S.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass

import lmdb

from asyncrl.errors import (
    AsyncrlError,
    BusyError,
    RunOverError,
    StoreError,
    TasksSolvedError,
    TooManyFailuresError,
    WireError,
)
from asyncrl.network.throttle import Throttled
from asyncrl.observe.metrics import Metrics
from asyncrl.replay.messages import (
    BUSY,
    ENDED,
    NOTHING,
    OK,
    OVER,
    REFUSED,
    SOLVED,
    Call,
    Reply,
    encode_reason,
    encode_reply,
)
from asyncrl.replay.protocol import GetStatus
from asyncrl.replay.service import ReplayService
from asyncrl.replay.store.environment import clear_room_errors, lacks_room
from asyncrl.replay.store.store import Store
from asyncrl.replay.store.transaction import Transaction
from asyncrl.wire import Buffer

log = logging.getLogger(__name__)

REPLIES_BYTES = 32 << 20
"""A commit takes no further request once its replies exceed this size. The other requests wait for the next commit."""
TICK_S = 0.25
REPORT_S = 5.0
PATIENCE_S = 1.0

Frames = list[Buffer]
Received = tuple[bytes, Call]
"""A client and its request."""
Answered = tuple[bytes, Frames]
"""A client and the reply to it."""
Commit = tuple[list[Answered], list[Received]]
"""The replies to committed requests, and the requests that wait for the next commit."""


class _UndoError(Exception):
    """A request failed after it had changed something."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without an answer yet, and the time until which its client waits."""

    call: Call
    until: float


class Committer:
    """Applies requests with `service`, and commits to `store`. It logs the service's report to `metrics` every
    REPORT_S. Only one thread at a time calls its methods, and no other thread writes the store.

    `clock` gives monotonic seconds. `next_tick` is the time of the next tick, in which the service does its periodic
    work.
    """

    def __init__(
        self, store: Store, service: ReplayService, clock: Callable[[], float], metrics: Metrics | None = None
    ) -> None:
        self._store = store
        self._service = service
        self._clock = clock
        self._metrics = metrics
        self._waiting: defaultdict[Hashable, dict[bytes, Waiting]] = defaultdict(dict)
        self.next_tick = self._next_report = clock()
        self._traced: set[tuple[str, type[Exception]]] = set()
        self._refusals = Throttled(log, "refused a request")
        self._delays = Throttled(log, "a request must wait")
        self._commits = Throttled(log, "nothing can be stored", logging.ERROR, burst=1)
        self._ends = Throttled(log, "the run must end", burst=1)

    def start(self) -> None:
        """Continue from the store. Raises StoreError: the store cannot be continued; OSError: its disk is full;
        ConfigError: the store is full."""
        with clear_room_errors(self._store.path), self._store.transaction() as tx:
            self._service.start(tx)
            self._service.clean(tx)

    def handle(self, requests: list[Received]) -> Commit:
        """Apply requests and commit. Returns the replies to send, and the requests that wait for the next commit."""
        try:
            if self._clock() >= self.next_tick:
                self._tick()
            taken, answered, replies = self._transact(requests)
        except lmdb.Error as error:
            return self._recover(error, requests), []
        self._forget(answered)
        return replies, requests[taken:]

    def _tick(self) -> None:
        self.next_tick = self._clock() + TICK_S
        try:
            with self._store.transaction() as tx:
                self._service.tick(tx)
                if self._metrics is not None and self._clock() >= self._next_report:
                    self._next_report = self._clock() + REPORT_S
                    values = self._service.report(tx)
                    self._metrics.log(int(values["version"]), {**values, **self._service.failing()})
        except (StoreError, lmdb.Error):
            raise
        except Exception as error:  # The tick was undone: the next one tries again.
            with self._store.transaction() as tx:
                # The failed tick may have removed leases from memory, but the store still has them. Read them again.
                self._service.start(tx)
                if self._is_new_bug(tx, "tick", error):
                    log.exception("internal error in a tick")

    def _transact(self, requests: list[Received]) -> tuple[int, list[tuple[Hashable, bytes]], list[Answered]]:
        """Apply all requests in one transaction. If a request must be undone, undo all, and apply each again in a
        nested transaction. That is rare and much slower."""
        try:
            return self._apply(requests, nested=False)
        except _UndoError:
            return self._apply(requests, nested=True)

    def _apply(
        self, requests: list[Received], nested: bool
    ) -> tuple[int, list[tuple[Hashable, bytes]], list[Answered]]:
        """Apply requests in a transaction. Returns the number of applied requests, the queue and client of each waiting
        request that was answered, and all replies. It stops early when the replies exceed REPLIES_BYTES. Answered
        requests stay in their queues until the commit."""
        replies: list[Answered] = []
        taken = size = 0
        with self._store.transaction() as tx:
            for client, call in requests:
                taken += 1
                reply = self._answer(tx, call, nested)
                if reply is None:
                    self._let_wait(client, call)
                    continue
                replies.append((client, reply))
                size += sum(map(len, reply))
                if size > REPLIES_BYTES:
                    break
            answered = self._retry_waiting(tx, nested, replies)
        return taken, answered, replies

    def _answer(self, tx: Transaction, call: Call, nested: bool) -> Frames | None:
        try:
            return self._attempt(tx, call, nested)
        except (lmdb.MapFullError, BusyError) as error:
            if isinstance(error, lmdb.MapFullError):
                self._service.readers.free_dead(tx)
            reason = self._postpone(error)
            self._delays.say(f"{call.kind}: {reason}")
            return encode_reason(BUSY, call.sequence, reason)
        except (StoreError, lmdb.Error, _UndoError):
            raise
        except TooManyFailuresError as error:
            self._ends.say(error)
            return encode_reason(ENDED, call.sequence, str(error))
        except TasksSolvedError as error:
            return encode_reason(SOLVED, call.sequence, str(error))
        except RunOverError:
            return encode_reply(OVER, call.sequence, Reply())
        except AsyncrlError as error:
            tx.add("refused")
            self._refusals.say(f"{call.kind:.50}: {error}")
            return encode_reason(REFUSED, call.sequence, str(error))
        except Exception as error:  # An internal error in one request must not affect other requests.
            reason = f"internal error, see the log of the replay: {type(error).__name__}: {error}"
            self._refusals.say(f"{call.kind}: {reason}")
            if self._is_new_bug(tx, call.kind, error):
                log.exception("internal error in a request %s", call.kind)
            return encode_reason(REFUSED, call.sequence, reason)

    def _is_new_bug(self, tx: Transaction, where: str, error: Exception) -> bool:
        """Count an internal error. True for the first of its kind, so that a client that repeats a request does not
        fill the log."""
        tx.add("internal_errors")
        known = (where, type(error)) in self._traced
        self._traced.add((where, type(error)))
        return not known

    def _attempt(self, tx: Transaction, call: Call, nested: bool) -> Frames | None:
        if nested:
            with tx.nested() as inner:
                return self._reply(inner, call)
        writes = tx.writes
        try:
            return self._reply(tx, call)
        except Exception as error:
            if tx.writes > writes:
                raise _UndoError from error
            raise

    def _reply(self, tx: Transaction, call: Call) -> Frames | None:
        reply = self._service.handle(tx, call)
        return None if reply is None else encode_reply(OK, call.sequence, reply)

    def _let_wait(self, client: bytes, call: Call) -> None:
        assert not isinstance(call.request, WireError)
        queue = self._waiting[call.request.queue()]
        queue.pop(client, None)
        queue[client] = Waiting(call, self._clock() + PATIENCE_S)

    def _retry_waiting(self, tx: Transaction, nested: bool, replies: list[Answered]) -> list[tuple[Hashable, bytes]]:
        """Answer the waiting requests that can be answered now or have waited for PATIENCE_S, oldest first. If the
        first request of a queue cannot be answered, no other request of this queue can."""
        answered: list[tuple[Hashable, bytes]] = []
        now = self._clock()
        for name, queue in self._waiting.items():
            empty = False
            for client, waiting in queue.items():
                reply = None if empty else self._answer(tx, waiting.call, nested)
                empty = reply is None
                if empty and now < waiting.until:
                    break
                replies.append((client, reply or encode_reply(NOTHING, waiting.call.sequence, Reply())))
                answered.append((name, client))
        return answered

    def _forget(self, answered: list[tuple[Hashable, bytes]]) -> None:
        for name, client in answered:
            del self._waiting[name][client]
            if not self._waiting[name]:
                del self._waiting[name]

    def _postpone(self, error: lmdb.Error | BusyError) -> str:
        """Return the reason why requests must be sent again later, and note it for the status."""
        if isinstance(error, BusyError):
            reason = str(error)
        elif isinstance(error, lmdb.MapFullError):
            reason = "the store is full; see replay.max_store_gb"
        else:
            full = lacks_room(error, self._store.path)
            why = "there is no room on its disk (make some, and the run goes on)" if full else str(error)
            reason = f"the store {self._store.path} cannot commit: {why}"
        self._service.put_off(reason)
        return reason

    def _recover(self, error: lmdb.Error, requests: list[Received]) -> list[Answered]:
        """Return a reply for each client of this commit, including the waiting ones. The replies say that nothing was
        stored. Also read the leases from the store again."""
        reason = self._postpone(error)
        self._commits.say(reason)
        waiting = [(client, each.call) for queue in self._waiting.values() for client, each in queue.items()]
        self._waiting.clear()
        # A request of this commit may be among those that wait.
        calls = {(client, call.sequence): call for client, call in (*waiting, *requests)}
        with self._store.transaction(write=False) as tx:
            self._service.readers.free_dead(tx)
            self._service.start(tx)
            return [(client, self._unstored(tx, call, reason)) for (client, _), call in calls.items()]

    def _unstored(self, tx: Transaction, call: Call, reason: str) -> Frames:
        """The reply to a request while nothing can be stored. A status request is still answered, to show the cause."""
        if isinstance(call.request, GetStatus):
            with suppress(AsyncrlError):  # A request of another run: the next commit refuses and counts it.
                return encode_reply(OK, call.sequence, self._service.handle(tx, call) or Reply())
        return encode_reason(BUSY, call.sequence, reason)
