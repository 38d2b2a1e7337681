"""The learner's end of the zmq route: sends the newest weights to every receiver that asks.

Receivers pull (transfers.py has the protocol), each with a bounded number of chunks outstanding. This is the
back-pressure: a slow receiver delays only itself. The server has its own thread, and training waits for no receiver. A
malformed request, or a request of another run, is answered `refused` with the reason, and counted.

The last `history` deltas are kept for receivers that hold the base of one of them. Host memory holds one version, its
deltas, and the versions in transfer.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import zmq

from asyncrl.config.bind import check_bind
from asyncrl.errors import RefusedError, WeightsError, WireError
from asyncrl.network.keys import ServerKeys
from asyncrl.network.listener import Listener
from asyncrl.network.throttle import Throttled
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.types import RunIdentity
from asyncrl.weights.canary import Canary
from asyncrl.weights.delta import Delta
from asyncrl.weights.group import BroadcastCall
from asyncrl.weights.manifest import MAX_MANIFEST_BYTES, WeightSnapshot
from asyncrl.weights.preparation import Preparation
from asyncrl.weights.transfers import Broadcasts, Transfers
from asyncrl.wire import Message, check_run, decode, encode, run_of

MAX_REQUEST_BYTES = 64 << 10
TICK_MS = 200
"""The answer `nothing` is sent at most this many milliseconds late, and a dead receiver is forgotten at most this late.
Weights are sent without this delay."""

CALL_POLL_S = 0.01

T = TypeVar("T")
Describe = Callable[[Sequence[bytes]], BroadcastCall]

logger = logging.getLogger(__name__)


class WeightServer:
    """Serves weights on tcp://host:port to the clients that `keys` admits. If `run` is given, only clients of that run
    are served.

    With port 0 it takes a free port. `broadcasts` is None if the learner does not broadcast. `spans` records each
    preparation of a version, and each transfer to a receiver.

    Raises ConfigError: other machines can reach the address, and neither `keys` nor `insecure` is given.
    UnavailableError: the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        run: RunIdentity | None = None,
        chunk_bytes: int = 2 << 20,
        forget_s: float = 30.0,
        history: int = 4,
        broadcasts: Broadcasts | None = None,
        threads: int = 2,
        spans: Spans | None = None,
    ) -> None:
        spans = spans or NoSpans()
        check_bind(host, insecure, secured=keys is not None)
        self._listener = Listener(context, f"tcp://{host}:{port}", keys, MAX_REQUEST_BYTES)
        self._preparation = Preparation(self._offer, chunk_bytes, history > 0, threads, spans)
        self._router = self._listener.socket
        self.endpoint = self._listener.endpoint
        self.refused = 0
        self._run = run
        self._refusals = Throttled(logger, "refused a request for weights")
        self._undelivered = Throttled(logger, "a receiver has left, or does not take its answers", logging.INFO)
        self._transfers = Transfers(forget_s, history, broadcasts, spans)
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="weights-publisher", daemon=True)
        self._thread.start()

    @property
    def offered(self) -> int:
        """The newest version that receivers can get, or -1 before the first."""
        return self._transfers.newest

    def joining(self, backend: str) -> int:
        """The number of receivers that wait for a broadcast over `backend`."""
        return len(self._transfers.joining(backend))

    @property
    def measured(self) -> dict[str, float]:
        """The measurements of `Preparation`, and the number of refused requests since the start."""
        return {**self._preparation.measured, "refused": float(self.refused)}

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], canary: Canary | None = None) -> None:
        """Begin to offer `tensors` as `version`, with its `canary`. The tensors must be on the CPU, and never change
        again.

        Raises WeightsError: the version is not newer than the last, a tensor cannot travel, or the publisher is closed.
        """
        if not self._thread.is_alive():
            raise WeightsError("the publisher is closed")
        self._preparation.begin(version, tensors, canary)

    def call(self, backend: str, describe: Describe, patience_s: float) -> Sequence[bytes]:
        """Call the receivers that asked to join a broadcast over `backend`, and return their identities.

        Waits at most `patience_s` for receivers that asked a moment ago, and are about to ask again. `describe` runs in
        this server's thread, and makes the call from the list of receivers. Raises WeightsError: the publisher is
        closed.
        """
        deadline = time.monotonic() + patience_s
        while True:
            done = self._in_thread(lambda: self._call(backend, describe, deadline))
            while not wait([done], TICK_MS / 1000).done:
                if not self._thread.is_alive():
                    raise WeightsError("the publisher is closed")
            if (receivers := done.result()) is not None:
                return receivers
            time.sleep(CALL_POLL_S)

    def close(self) -> None:
        """Stop serving. Running transfers are cut off, and their receivers wait for the next publisher."""
        self._preparation.close()
        self._closing.set()
        self._wake.send(b".")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _in_thread(self, call: Callable[[], T]) -> Future[T]:
        """Have this server's thread run `call` soon. The future gets its result."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        self._wake.send(b".")
        return done

    def _call(self, backend: str, describe: Describe, deadline: float) -> Sequence[bytes] | None:
        """Call the receivers that joined. Returns None if a receiver that asked to join a moment ago is about to ask
        again."""
        now = time.monotonic()
        if self._transfers.absent(backend, now) and now < deadline:
            return None
        receivers = self._transfers.joining(backend)
        if receivers:
            for receiver, message in self._transfers.call(receivers, describe(receivers)):
                self._send(receiver, message)
        return receivers

    def _offer(self, snapshot: WeightSnapshot, delta: Delta | None) -> None:
        self._in_thread(lambda: self._transfers.offer(snapshot, delta))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        with closing(self._listener):
            while not self._closing.is_set():
                events = dict(poller.poll(TICK_MS))
                if self._woken.fileno() in events:
                    self._woken.recv(1)
                while not self._calls.empty():
                    call, done = self._calls.get()
                    try:
                        done.set_result(call())
                    except Exception as error:  # noqa: BLE001 - the caller gets it
                        done.set_exception(error)
                if self._router in events:
                    self._answer(*self._router.recv_multipart())
                for receiver, reply in self._transfers.due(time.monotonic()):
                    self._send(receiver, reply)

    def _answer(self, receiver: bytes, *frames: bytes) -> None:
        try:
            request = decode(frames)
            if self._run is not None:
                check_run(run_of(request), request.kind, self._run, "weight publisher", "network.weights_port")
            reply = self._transfers.handle(receiver, request, time.monotonic())
        except (WireError, RefusedError) as error:
            reply = self._refused(0, error)
        if reply:
            self._send(receiver, reply)

    def _refused(self, sequence: int, error: WireError | RefusedError) -> Message:
        self.refused += 1
        self._refusals.say(error)
        return Message("refused", sequence, {"reason": str(error)})

    def _send(self, receiver: bytes, message: Message) -> None:
        try:
            frames = encode(message, MAX_MANIFEST_BYTES)
        except WireError as error:
            frames = encode(self._refused(message.sequence, error))
        try:
            self._router.send_multipart([receiver, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._undelivered.say(error)
