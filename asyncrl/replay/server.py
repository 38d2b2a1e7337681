"""The replay's socket: collects requests, has them applied and committed, and only then answers.

A helper thread applies and commits a batch of requests (`committer.py`) while the main thread receives the next batch
(group commit). No reply is sent before its request is committed. Reads of stored trajectories need no commit and are
answered at once. A request that only renews a lease waits briefly for other requests, to share their commit.

Back-pressure: a commit takes at most BATCH requests, or fewer if their replies become too large. During a commit, at
most BATCH further requests are received. All other requests stay in the bounded queues of the sockets, and a client
stops sending when too many of its requests are unanswered.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from asyncrl.machine.activity import Activity
from asyncrl.machine.files import when_there_is_room
from asyncrl.network.throttle import Throttled
from asyncrl.observe.metrics import Metrics
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.replay.call_thread import CallThread
from asyncrl.replay.committer import Commit, Committer, Frames, Received
from asyncrl.replay.messages import OK, Call, Reply, decode_request, encode_reply
from asyncrl.replay.protocol import Fetch, FetchImage, GetClock
from asyncrl.replay.service import ReplayService
from asyncrl.replay.store.store import Store

log = logging.getLogger(__name__)

BATCH = 256
COMPANY_S = 0.02
"""The time for which requests that only renew leases wait for other requests, to share a commit."""
COMMIT_S, MAX_COMMIT_S = 0.002, 0.032
"""During a commit, requests are received every COMMIT_S, since waking up for each request would cost more than
receiving it. While none arrives, the interval doubles up to MAX_COMMIT_S."""


class ReplayServer:
    """Serves a bound ROUTER socket until `stop` is set, and logs the service's report to `metrics` every few
    seconds. `clock` gives monotonic seconds. Each commit counts as progress in `activity`. GetClock is answered with
    the clock of `spans`."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        store: Store,
        service: ReplayService,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        activity: Activity | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._socket = socket
        self._store = store
        self._service = service
        self._clock = clock
        self._requests: list[Received] = []
        self._oldest_at = 0.0
        self._committer = Committer(store, service, clock, metrics)
        self._activity = activity or Activity()
        self._spans = spans or NoSpans()
        self._undelivered = Throttled(log, "a requester has left, or does not take its answers", logging.INFO)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, or until the run is over. If the disk is too full to start, waits for room.

        Raises StoreError: the store is damaged; StoppedError: `stop` was set before there was room."""
        when_there_is_room(self._committer.start, stop, f"the store {self._store.path}")
        with CallThread(self._committer.handle, "store") as committing:
            pause = COMMIT_S
            self._activity.enter("serve")
            while not (stop.is_set() or self._is_over(committing.busy)):
                done = None
                if committing.busy:
                    done = committing.result(pause)
                else:
                    self._activity.advance()
                    wait_s = min(self._due_at(), self._committer.next_tick) - self._clock()
                    self._socket.poll(max(0, math.ceil(wait_s * 1000)))
                pause = COMMIT_S if self._receive() else min(2 * pause, MAX_COMMIT_S)
                if done is not None:
                    self._finish(done)
                if not committing.busy and self._due():
                    committing.begin(self._take())
                    pause = COMMIT_S
            if committing.busy and (done := committing.result()) is not None:
                self._finish(done)

    def serve_once(self) -> None:
        """Receive, apply, commit and answer the requests that have arrived. In contrast, `run` receives the next
        requests during the commit."""
        self._receive()
        if self._due():
            self._finish(self._committer.handle(self._take()))

    def _is_over(self, is_busy: bool) -> bool:
        """True if the run is over, and every received request is answered."""
        return not (is_busy or self._requests) and self._service.is_over()

    def _due(self) -> bool:
        return self._clock() >= min(self._due_at(), self._committer.next_tick)

    def _due_at(self) -> float:
        """The time at which to begin a commit of the received requests: at once, unless all of them only renew
        leases."""
        # Without the wait, each renewal of a thousand actors would cost a commit. No episode depends on a renewal.
        if not self._requests:
            return math.inf
        is_company = len(self._requests) >= BATCH or not all(call.renews for _, call in self._requests)
        return self._oldest_at + (0.0 if is_company else COMPANY_S)

    def _take(self) -> list[Received]:
        requests, self._requests = self._requests, []
        return requests

    def _receive(self) -> bool:
        """Receive requests, up to BATCH, and answer at once those that need no commit. True if any request arrived."""
        any_arrived = False
        for _ in range(BATCH - len(self._requests)):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            any_arrived = True
            call = decode_request([frame.buffer for frame in frames])
            if isinstance(call.request, GetClock):
                now = self._spans.wall(self._spans.clock())
                self._send(client.bytes, encode_reply(OK, call.sequence, Reply(now)))
            elif not (isinstance(call.request, (Fetch, FetchImage)) and self._fetch(client.bytes, call)):
                if not self._requests:
                    self._oldest_at = self._clock()
                self._requests.append((client.bytes, call))
        return any_arrived

    def _fetch(self, client: bytes, call: Call) -> bool:
        """Send stored frames. False if that fails: then the next commit refuses and counts the request."""
        with suppress(Exception), self._store.transaction(write=False) as tx:
            self._send(client, encode_reply(OK, call.sequence, self._service.handle(tx, call) or Reply()))
            return True
        return False

    def _finish(self, done: Commit) -> None:
        # Under constant load the next commit begins at once, so that only this line reports progress.
        self._activity.advance()
        replies, rest = done
        self._requests = rest + self._requests
        for client, reply in replies:
            self._send(client, reply)

    def _send(self, client: bytes, reply: Frames) -> None:
        try:
            self._socket.send_multipart([client, *reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._undelivered.say(error)
