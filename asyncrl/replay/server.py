"""The replay's socket: collects requests, applies them in one transaction, commits, and only then answers.

So many requests share one commit as arrive while the previous one is written (group commit), and no reply leaves before
what it promises is durable. A request that has nothing to give yet waits here until the state changes or its patience
ends. A malformed or refused request is answered with the reason, counted, and harms nobody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import lmdb
import zmq

from asyncrl.errors import AsyncrlError, StoreError
from asyncrl.network.throttle import MAX_REASON, Throttled
from asyncrl.replay.service import Service
from asyncrl.replay.store import Store, Transaction
from asyncrl.wire import Buffer, Message, decode, encode

log = logging.getLogger(__name__)

BATCH = 256
TICK_S = 0.25
PATIENCE_S = 1.0


@dataclass(slots=True)
class Waiting:
    """A request that has no answer yet, and until when its requester waits."""

    client: bytes
    request: Message
    until: float


class Server:
    """Serves a bound ROUTER socket until `stop` is set. `clock` gives monotonic seconds."""

    def __init__(
        self, socket: zmq.Socket[bytes], store: Store, service: Service, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = socket
        self._store = store
        self._service = service
        self._clock = clock
        self._waiting: dict[tuple[bytes, str], Waiting] = {}
        self._next_tick = clock()
        self._refusals = Throttled(log, "refused a request")
        self._undelivered = Throttled(log, "a requester has gone before its answer", logging.INFO)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        with self._store.transaction() as tx:
            self._service.start(tx)
        while not stop.is_set():
            if self._socket.poll(int(TICK_S * 1000)) or self._clock() >= self._next_tick:
                self._turn()

    def _turn(self) -> None:
        requests = self._receive()
        replies: list[tuple[bytes, Message]] = []
        try:
            with self._store.transaction() as tx:
                if self._clock() >= self._next_tick:
                    self._next_tick = self._clock() + TICK_S
                    self._service.tick(tx)
                for client, frames in requests:
                    replies += self._answer(tx, client, frames)
                replies += self._retry_waiting(tx)
        except lmdb.Error as error:
            self._recover(StoreError(f"the store cannot commit: {error}; is the disk full?"), requests)
            return
        for client, reply in replies:
            self._send(client, reply)

    def _receive(self) -> list[tuple[bytes, list[Buffer]]]:
        requests: list[tuple[bytes, list[Buffer]]] = []
        while len(requests) < BATCH:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            requests.append((client.bytes, [frame.buffer for frame in frames]))
        return requests

    def _answer(self, tx: Transaction, client: bytes, frames: list[Buffer]) -> list[tuple[bytes, Message]]:
        request = Message("unreadable")
        try:
            request = decode(frames)
            with tx.nested() as nested:
                reply = self._service.handle(nested, request)
        except lmdb.MapFullError:
            return [
                (client, Message("busy", request.sequence, {"reason": "the store is full; see replay.max_store_gb"}))
            ]
        except (AsyncrlError, lmdb.BadValsizeError) as error:
            return [(client, self._refuse(tx, request, error))]
        if reply is None:
            self._waiting[client, request.kind] = Waiting(client, request, self._clock() + PATIENCE_S)
            return []
        return [(client, reply)]

    def _retry_waiting(self, tx: Transaction) -> list[tuple[bytes, Message]]:
        """Answer those waiting, oldest first, who can be answered now or whose patience is over."""
        replies = []
        empty: set[str] = set()
        for key, waiting in list(self._waiting.items()):
            reply = None
            if waiting.request.kind not in empty:
                reply = self._try(tx, waiting.request)
                if reply is None and waiting.request.kind == "tickets":
                    empty.add("tickets")
            if reply is None and self._clock() >= waiting.until:
                reply = Message("nothing", waiting.request.sequence)
            if reply is not None:
                del self._waiting[key]
                replies.append((waiting.client, reply))
        return replies

    def _try(self, tx: Transaction, request: Message) -> Message | None:
        try:
            with tx.nested() as nested:
                return self._service.handle(nested, request)
        except AsyncrlError as error:
            return self._refuse(tx, request, error)

    def _refuse(self, tx: Transaction, request: Message, error: Exception) -> Message:
        tx.add("refused")
        self._refusals.say(f"{request.kind:.50}: {error}")
        return Message("refused", request.sequence, {"reason": str(error)[:MAX_REASON]})

    def _recover(self, error: StoreError, requests: list[tuple[bytes, list[Buffer]]]) -> None:
        """Nothing of this turn was stored: say so to everyone, and take up the leases as the store has them."""
        log.error("%s", error)
        with self._store.transaction(write=False) as tx:
            self._service.start(tx)
        for client, frames in requests:
            try:
                sequence = decode(frames).sequence
            except AsyncrlError:
                sequence = 0
            self._send(client, Message("busy", sequence, {"reason": str(error)}))

    def _send(self, client: bytes, reply: Message) -> None:
        try:
            self._socket.send_multipart([client, *encode(reply)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._undelivered.say(error)
