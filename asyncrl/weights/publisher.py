"""The learner's end: offers the newest weights to every receiver that asks, in a thread of its own.

Receivers pull (the protocol is in `offers.py`), each with a bounded number of chunks outstanding, so a slow receiver
delays nobody but itself, and training waits for none. Chunks are sent from the tensors' own memory, without a copy. A
malformed request is answered `refused` with the reason, and counted.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch
import zmq

from asyncrl.config.checks import check_bind
from asyncrl.errors import WeightsError, WireError
from asyncrl.network.keys import ServerKeys
from asyncrl.network.sockets import listen
from asyncrl.network.throttle import MAX_REASON, Throttled
from asyncrl.weights.manifest import DTYPES, MAX_CHUNK_BYTES, Snapshot, dtype_name, take_snapshot
from asyncrl.weights.offers import Offers
from asyncrl.wire import Message, decode, encode

MAX_REQUEST_BYTES = 64 << 10
TICK_MS = 200
"""How late an answer `nothing`, or the forgetting of a dead receiver, may come. Weights never wait for it."""

logger = logging.getLogger(__name__)


class Publisher:
    """Serves weights on tcp://host:port, to the clients that `keys` lets in; port 0 takes a free one.

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
        chunk_bytes: int = 4 << 20,
        forget_s: float = 30.0,
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise WeightsError(f"chunk_bytes is {chunk_bytes}; it must be 1 to {MAX_CHUNK_BYTES}")
        check_bind(host, insecure, secured=keys is not None)
        self._listener = listen(context, f"tcp://{host}:{port}", keys, MAX_REQUEST_BYTES)
        self._router = self._listener.socket
        self.endpoint = self._listener.endpoint
        self.refused = 0
        self._refusals = Throttled(logger, "refused a request for weights")
        self._undelivered = Throttled(logger, "a receiver has gone before its answer, or takes none", logging.INFO)
        self._chunk_bytes = chunk_bytes
        self._offers = Offers(forget_s)
        self._published = -1
        self._ready: Snapshot | None = None
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        # Checksums have a worker of their own so that they hold up neither training nor a transfer.
        self._checksums = ThreadPoolExecutor(1, thread_name_prefix="weights-checksums")
        self._thread = threading.Thread(target=self._serve, name="weights-publisher", daemon=True)
        self._thread.start()

    @property
    def offered(self) -> int:
        """The newest version that receivers can get; -1 before the first."""
        return self._offers.newest

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
        self._checksums.submit(self._prepare, version, dict(tensors))

    def close(self) -> None:
        """Stop serving; transfers under way are cut off, and their receivers wait for the next publisher."""
        self._checksums.shutdown(cancel_futures=True)
        self._closing.set()
        self._wake.send(b".")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _prepare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if version == self._published:
            self._ready = take_snapshot(version, tensors, self._chunk_bytes)
            self._wake.send(b".")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        with closing(self._listener):
            while not self._closing.is_set():
                events = dict(poller.poll(TICK_MS))
                if self._woken.fileno() in events:
                    self._woken.recv(1)
                if self._ready:
                    self._offers.offer(self._ready)
                if self._router in events:
                    self._answer(*self._router.recv_multipart())
                for receiver, reply in self._offers.due(time.monotonic()):
                    self._send(receiver, reply)

    def _answer(self, receiver: bytes, *frames: bytes) -> None:
        try:
            reply = self._offers.handle(receiver, decode(frames), time.monotonic())
        except WireError as error:
            self.refused += 1
            self._refusals.say(error)
            reply = Message("refused", body={"reason": str(error)[:MAX_REASON]})
        if reply:
            self._send(receiver, reply)

    def _send(self, receiver: bytes, message: Message) -> None:
        try:
            self._router.send_multipart([receiver, *encode(message)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._undelivered.say(error)
