"""The replay's socket: collects requests, applies them in one transaction, commits, and only then answers.

So many requests share one commit as arrive while the previous one is written (group commit), and no reply leaves before
what it promises is durable. A request that has nothing to give yet waits here until the state changes or its patience
ends. A malformed or refused request is answered with the reason, counted, and harms nobody else; so is one whose reply
cannot be encoded, which then has no effect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import lmdb
import zmq

from asyncrl.errors import AsyncrlError, BusyError, StoreError
from asyncrl.network.throttle import Throttled
from asyncrl.observe.metrics import Metrics
from asyncrl.replay.service import Service
from asyncrl.replay.store import Store, Transaction
from asyncrl.wire import MAX_LARGE_HEADER_BYTES, Buffer, Message, decode, encode

log = logging.getLogger(__name__)

BATCH = 256
REPLIES_BYTES = 32 << 20
"""Replies that are collected before they are sent; what is asked for beyond them waits for the next turn."""
TICK_S = 0.25
REPORT_S = 5.0
PATIENCE_S = 1.0

Frames = list[Buffer]
Received = tuple[bytes, Frames]
Reply = tuple[bytes, Frames]
Place = tuple[tuple[str, ...], bytes]
"""Where a waiting request stands: its queue and its client."""

WAITS_FOR = ("serves", "step", "version")
"""What tells apart requests of one kind that wait for different things."""


class _UndoError(Exception):
    """A request was refused after it had changed something."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that has no answer yet, and until when its requester waits."""

    request: Message
    until: float


class Server:
    """Serves a bound ROUTER socket until `stop` is set, and tells `metrics` now and then what the service reports.
    `clock` gives monotonic seconds."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        store: Store,
        service: Service,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        self._socket = socket
        self._store = store
        self._service = service
        self._clock = clock
        self._waiting: defaultdict[tuple[str, ...], dict[bytes, Waiting]] = defaultdict(dict)
        self._backlog: list[Received] = []
        self._metrics = metrics
        self._next_tick = self._next_report = clock()
        self._refusals = Throttled(log, "refused a request")
        self._delays = Throttled(log, "a request must wait")
        self._undelivered = Throttled(log, "a requester has gone, or does not take its answers", logging.INFO)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. Raises StoreError: the store is damaged, where nothing can be answered for."""
        with self._store.transaction() as tx:
            self._service.start(tx)
        while not stop.is_set():
            if self._backlog or self._socket.poll(int(TICK_S * 1000)) or self._clock() >= self._next_tick:
                self.turn()

    def turn(self) -> None:
        """Take what requests are there, apply them, commit, and answer."""
        requests, self._backlog = self._backlog or self._receive(), []
        try:
            if self._clock() >= self._next_tick:
                self._tick()
            taken, answered, replies = self._transact(requests)
        except lmdb.Error as error:
            self._recover(StoreError(f"the store cannot commit: {error}; is the disk full?"), requests)
            return
        self._backlog = requests[taken:]
        self._forget(answered)
        for client, reply in replies:
            self._send(client, reply)

    def _tick(self) -> None:
        self._next_tick = self._clock() + TICK_S
        with self._store.transaction() as tx:
            self._service.tick(tx)
            if self._metrics is not None and self._clock() >= self._next_report:
                self._next_report = self._clock() + REPORT_S
                values = self._service.report(tx)
                self._metrics.log(int(values["version"]), {**values, "failing": self._service.failing.text()})

    def _transact(self, requests: list[Received]) -> tuple[int, list[Place], list[Reply]]:
        """Apply all requests in one transaction. Where one must be undone, all are, and each is tried again within a
        transaction of its own inside: that is rare, and costs far more."""
        try:
            return self._apply(requests, nested=False)
        except _UndoError:
            return self._apply(requests, nested=True)

    def _apply(self, requests: list[Received], nested: bool) -> tuple[int, list[Place], list[Reply]]:
        """How many requests were taken before the replies were too large, who of those waiting is answered, and all
        replies. Until all is final, nobody is forgotten."""
        replies: list[Reply] = []
        taken = size = 0
        with self._store.transaction() as tx:
            for client, frames in requests:
                taken += 1
                try:
                    request = decode(frames)
                except AsyncrlError as error:
                    replies.append((client, self._refuse(tx, Message("unreadable"), error)))
                    continue
                reply = self._answer(tx, request, nested)
                if reply is None:
                    self._let_wait(client, request)
                    continue
                replies.append((client, reply))
                size += sum(map(len, reply))
                if size > REPLIES_BYTES:
                    break
            answered = self._retry_waiting(tx, nested, replies)
        return taken, answered, replies

    def _receive(self) -> list[Received]:
        requests: list[Received] = []
        while len(requests) < BATCH:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            requests.append((client.bytes, [frame.buffer for frame in frames]))
        return requests

    def _answer(self, tx: Transaction, request: Message, nested: bool) -> Frames | None:
        try:
            return self._handle(tx, request, nested)
        except (lmdb.MapFullError, BusyError) as error:
            reason = str(error) if isinstance(error, BusyError) else "the store is full; see replay.max_store_gb"
            self._delays.say(f"{request.kind}: {reason}")
            return encode(Message("busy", request.sequence, {"reason": reason}))
        except StoreError:
            raise
        except (AsyncrlError, lmdb.BadValsizeError) as error:
            return self._refuse(tx, request, error)

    def _handle(self, tx: Transaction, request: Message, nested: bool) -> Frames | None:
        if nested:
            return self._handle_nested(tx, request)
        writes = tx.writes
        try:
            return self._reply(tx, request)
        except (AsyncrlError, lmdb.Error) as error:
            if tx.writes > writes:
                raise _UndoError from error
            raise

    def _handle_nested(self, tx: Transaction, request: Message) -> Frames | None:
        try:
            with tx.nested() as inner:
                return self._reply(inner, request)
        except lmdb.MapFullError:
            if not self._service.readers.free_dead(tx):
                raise
        with tx.nested() as inner:
            return self._reply(inner, request)

    def _reply(self, tx: Transaction, request: Message) -> Frames | None:
        reply = self._service.handle(tx, request)
        return None if reply is None else encode(reply, MAX_LARGE_HEADER_BYTES)

    def _refuse(self, tx: Transaction, request: Message, error: Exception) -> Frames:
        tx.add("refused")
        self._refusals.say(f"{request.kind:.50}: {error}")
        return encode(Message("refused", request.sequence, {"reason": str(error)}))

    def _let_wait(self, client: bytes, request: Message) -> None:
        queue = self._waiting[request.kind, *(str(request.body.get(name)) for name in WAITS_FOR)]
        queue.pop(client, None)
        queue[client] = Waiting(request, self._clock() + PATIENCE_S)

    def _retry_waiting(self, tx: Transaction, nested: bool, replies: list[Reply]) -> list[Place]:
        """Answer those waiting, oldest first, who can be answered now or whose patience is over. Where there is nothing
        for the first of a queue, there is nothing for the others."""
        answered: list[Place] = []
        now = self._clock()
        for name, queue in self._waiting.items():
            empty = False
            for client, waiting in queue.items():
                reply = None if empty else self._answer(tx, waiting.request, nested)
                empty = reply is None
                if empty and now < waiting.until:
                    break
                replies.append((client, reply or encode(Message("nothing", waiting.request.sequence))))
                answered.append((name, client))
        return answered

    def _forget(self, answered: list[Place]) -> None:
        for name, client in answered:
            del self._waiting[name][client]
            if not self._waiting[name]:
                del self._waiting[name]

    def _recover(self, error: StoreError, requests: list[Received]) -> None:
        """Nothing of this turn was stored: say so to everyone, and take up the leases as the store has them."""
        log.error("%s", error)
        with self._store.transaction(write=False) as tx:
            self._service.readers.free_dead(tx)
            self._service.start(tx)
        for client, frames in requests:
            try:
                sequence = decode(frames).sequence
            except AsyncrlError:
                sequence = 0
            self._send(client, encode(Message("busy", sequence, {"reason": str(error)})))

    def _send(self, client: bytes, reply: Frames) -> None:
        try:
            self._socket.send_multipart([client, *reply], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._undelivered.say(error)
