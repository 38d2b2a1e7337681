"""The learner's end of the zmq channel: gives the newest weights to every receiver that asks.

Receivers pull (transfers.py has the protocol), each with a bounded number of chunks outstanding, so a slow receiver
delays only itself. A thread of its own answers, and training waits for no receiver. A malformed request, or one of
another run, is answered `refused` with the reason, and counted.

Each version is compared once with the one before it. The last `history` deltas are kept for receivers that hold one of
their bases. Host memory holds one version, its deltas, and what is in transfer; and a second version while two are
compared.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import zmq

from asyncrl.config.bind import check_bind
from asyncrl.errors import RefusedError, WeightsError, WireError
from asyncrl.network.keys import ServerKeys
from asyncrl.network.listener import Listener
from asyncrl.network.throttle import Throttled
from asyncrl.types import RunIdentity
from asyncrl.weights.delta import Delta, diff, same_layout
from asyncrl.weights.group import BroadcastCall
from asyncrl.weights.manifest import (
    DTYPES,
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    WeightSnapshot,
    dtype_name,
    take_snapshot,
)
from asyncrl.weights.transfers import Broadcasts, Transfers
from asyncrl.wire import Message, check_run, decode, encode, run_of

MAX_REQUEST_BYTES = 64 << 10
TICK_MS = 200
"""How late an answer `nothing` may come, or a dead receiver be forgotten. Weights never wait for it."""

CALL_POLL_S = 0.01

T = TypeVar("T")
Describe = Callable[[Sequence[bytes]], BroadcastCall]

logger = logging.getLogger(__name__)


class WeightServer:
    """Serves weights on tcp://host:port to the clients that `keys` admits, and only those of `run` if it is given.

    Port 0 takes a free one. `broadcasts` says how the learner broadcasts, if it does.

    Raises ConfigError: others can reach the address, and there are neither `keys` nor `insecure`; UnavailableError: it
    is taken.
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
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise WeightsError(f"chunk_bytes is {chunk_bytes}; it must be 1 to {MAX_CHUNK_BYTES}")
        check_bind(host, insecure, secured=keys is not None)
        self._listener = Listener(context, f"tcp://{host}:{port}", keys, MAX_REQUEST_BYTES)
        self._router = self._listener.socket
        self.endpoint = self._listener.endpoint
        self.refused = 0
        self._run = run
        self._refusals = Throttled(logger, "refused a request for weights")
        self._undelivered = Throttled(logger, "a receiver has gone before its answer, or takes none", logging.INFO)
        self._chunk_bytes = chunk_bytes
        self._transfers = Transfers(forget_s, history, broadcasts)
        self._published = -1
        self._with_deltas = history > 0
        self._last: WeightSnapshot | None = None
        self._measured: dict[str, float] = {}
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        # Checksums and deltas have workers of their own so that they hold up neither training nor a transfer.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="weights-preparing")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-tensors")
        self._thread = threading.Thread(target=self._serve, name="weights-publisher", daemon=True)
        self._thread.start()

    @property
    def offered(self) -> int:
        """The newest version that receivers can get; -1 before the first."""
        return self._transfers.newest

    def joining(self, backend: str) -> int:
        """How many receivers wait for a broadcast over `backend`."""
        return len(self._transfers.joining(backend))

    @property
    def measured(self) -> dict[str, float]:
        """Of the last version that was prepared: its bytes, the bytes of its delta, the share of elements that the
        delta changes, and the seconds of preparing it. Also the requests refused so far."""
        return {**self._measured, "refused": float(self.refused)}

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Offer `tensors` (on the CPU, never changed again) as `version`; returns at once.

        Raises WeightsError: the version is not newer than the last, a tensor cannot travel, or the publisher is closed.
        """
        if version <= self._published:
            raise WeightsError(f"version {version} was to follow {self._published}; a version never moves backwards")
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" or dtype_name(tensor.dtype) not in DTYPES:
                raise WeightsError(f"{name} is {tensor.dtype} on {tensor.device}; move it to the CPU as {list(DTYPES)}")
        if not self._thread.is_alive():
            raise WeightsError("the publisher is closed")
        self._published = version
        self._preparing.submit(self._prepare, version, dict(tensors)).add_done_callback(_log_failure)

    def call(self, backend: str, describe: Describe, patience_s: float) -> Sequence[bytes]:
        """Call the receivers that asked to join a broadcast over `backend`; returns who they are.

        Waits at most `patience_s` for receivers that asked a moment ago. `describe` makes the message from the list of
        receivers, in this server's thread. Raises WeightsError: the publisher is closed.
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
        """Stop serving; transfers under way are cut off, and their receivers wait for the next publisher."""
        self._preparing.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        self._closing.set()
        self._wake.send(b".")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _in_thread(self, call: Callable[[], T]) -> Future[T]:
        """What `call` gives, which this server's thread runs soon."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        self._wake.send(b".")
        return done

    def _call(self, backend: str, describe: Describe, deadline: float) -> Sequence[bytes] | None:
        """None: a receiver that asked to join a moment ago is about to ask again."""
        now = time.monotonic()
        if self._transfers.absent(backend, now) and now < deadline:
            return None
        receivers = self._transfers.joining(backend)
        if receivers:
            for receiver, message in self._transfers.call(receivers, describe(receivers)):
                self._send(receiver, message)
        return receivers

    def _prepare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if version != self._published:
            return
        started = time.perf_counter()
        snapshot = take_snapshot(version, tensors, self._chunk_bytes, self._pool.map)
        delta = self._delta_to(snapshot)
        self._last = snapshot
        self._measured = {"bytes": float(snapshot.manifest.nbytes), "prepare_s": time.perf_counter() - started}
        if delta is not None:
            elements = sum(math.prod(spec.shape) for spec in snapshot.manifest.tensors)
            self._measured["delta_bytes"] = float(len(delta.payload))
            self._measured["density"] = delta.header.changed / max(1, elements)
        self._in_thread(partial(self._transfers.offer, snapshot, delta))

    def _delta_to(self, snapshot: WeightSnapshot) -> Delta | None:
        last = self._last
        if not self._with_deltas or last is None or not same_layout(last.manifest, snapshot.manifest):
            return None
        return diff(last, snapshot, self._pool.map)

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
                    done.set_result(call())
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


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("a version was not prepared, receivers stay at the one before", exc_info=error)
