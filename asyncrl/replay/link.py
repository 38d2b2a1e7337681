"""A connection to the replay that lasts: requests are sent until they are answered, through breaks and restarts.

A link belongs to one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq

from asyncrl.errors import RefusedError, StoppedError, UnavailableError
from asyncrl.network.keys import CHECK_KEYS, ClientKeys
from asyncrl.network.sockets import Watch, connect
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.replay.clock_probe import ClockProbe
from asyncrl.replay.protocol import BUSY, Answer, ReplayRequest, decode_reply, encode_request
from asyncrl.types import RunIdentity
from asyncrl.wire import Buffer

log = logging.getLogger(__name__)

RETRY_S = 5.0
BREAK_S = 0.1
"""The wait after a connection broke. It doubles up to RETRY_S while further connections break without an answer."""
POLL_MS = 100
CREDITS = 32
CREDIT_BYTES = 2 << 20
"""Bounds on the number and bytes of the unanswered requests of one link; one request always fits."""

Request = tuple[ReplayRequest, Sequence[Buffer]]
"""A request with its raw frames."""


class ReplayLink:
    """The link of `worker` to the replay at `endpoint`. The other arguments are those of a ReplayClient."""

    def __init__(
        self,
        endpoint: str,
        worker: str,
        stop: threading.Event | None = None,
        give_up_s: float | None = None,
        context: zmq.Context[Any] | None = None,
        keys: ClientKeys | None = None,
        run: RunIdentity | None = None,
        retry_s: float = RETRY_S,
        spans: Spans | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._worker = worker
        self._stop = stop or threading.Event()
        self._give_up_s = give_up_s
        self._context = context or zmq.Context.instance()
        self._keys = keys
        self._run = run
        self._retry_s = retry_s
        self._sequence = 0
        self._break_s = BREAK_S
        self._probe = ClockProbe(endpoint, spans or NoSpans())
        self._connect()

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = connect(self._context, self._endpoint, self._keys)
        self._watch = Watch(self._socket)

    def close(self) -> None:
        self._watch.close()
        self._socket.close()

    def answers(self, requests: Sequence[Request], credits: int = CREDITS) -> list[Answer]:
        """What the replay says to each request, up to `credits` of them under way at once.

        Raises StoppedError and UnavailableError, as `stop` and `give_up_s` say; RefusedError: the replay cannot tell
        which request it refuses; WireError: one cannot be encoded, and none was sent.
        """
        if not requests:
            return []
        first, self._sequence = self._sequence + 1, self._sequence + len(requests)
        messages = {
            number: encode_request(request, number, self._run, frames)
            for number, (request, frames) in enumerate(requests, first)
        }
        if self._probe.is_due():
            self._sequence += 1
            messages = {self._sequence: self._probe.message(self._sequence), **messages}
        answers: dict[int, Answer] = {}
        started = time.monotonic()
        while len(answers) < len(messages):
            rest = {number: each for number, each in messages.items() if number not in answers}
            self._exchange(rest, credits, answers, started)
        return [answers[number] for number in range(first, first + len(requests))]

    def _exchange(
        self, messages: Mapping[int, list[Buffer]], credits: int, answers: dict[int, Answer], started: float
    ) -> None:
        """Send messages as credits allow and take answers, until all have come or the rest must be sent again."""
        unsent, away = deque(messages.items()), dict[int, int]()
        self._watch.broke()
        deadline = time.monotonic() + self._retry_s
        while unsent or away:
            # ZeroMQ gives up a connection whose handshake was refused: a send that waits there would wait for ever.
            with suppress(zmq.Again):
                while unsent and _credit(away, credits):
                    number, frames = unsent[0]
                    self._probe.sends(number)
                    self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    away[number] = sum(map(len, frames))
                    unsent.popleft()
            if time.monotonic() > deadline:
                return self._reconnect(started)
            answer = self._receive(started)
            if answer is None:
                if self._watch.broke():
                    self._stop.wait(self._break_s)
                    self._break_s = min(self._retry_s, 2 * self._break_s)
                    return self._reconnect(started)
                continue
            if answer.sequence and answer.sequence not in away:
                continue
            if answer.kind == BUSY:
                log.warning("the replay is busy: %s; asking again", answer.reason)
                self._stop.wait(self._retry_s)
                return None
            if answer.sequence == 0:
                raise RefusedError(f"the replay refused: {answer.reason}")
            deadline = time.monotonic() + self._retry_s
            self._break_s = BREAK_S
            self._probe.received(answer)
            answers[answer.sequence] = answer
            del away[answer.sequence]
        return None

    def _receive(self, started: float) -> Answer | None:
        """The next message, or None if there is none for a moment."""
        if self._stop.is_set():
            raise StoppedError("stopped while waiting for the replay")
        if self._give_up_s is not None and time.monotonic() - started > self._give_up_s:
            raise UnavailableError(f"no answer from the replay at {self._endpoint} within {self._give_up_s:.0f} s")
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:  # A poll costs more than an attempt, and most replies come in bursts.
            if not self._socket.poll(POLL_MS):
                return None
            frames = self._socket.recv_multipart(copy=False)
        return decode_reply([frame.buffer for frame in frames])

    def _reconnect(self, started: float) -> None:
        """Take a fresh connection, since the old one may lead nowhere."""
        advice = f"; {CHECK_KEYS}" if self._keys else ""
        waited = time.monotonic() - started
        log.warning("%s waits for the replay at %s since %.0f s%s", self._worker, self._endpoint, waited, advice)
        self.close()
        self._connect()


def _credit(away: Mapping[int, int], credits: int) -> bool:
    """Whether one more request may leave beside those that are `away`, by number and bytes."""
    return not away or (len(away) < credits and sum(away.values()) < CREDIT_BYTES)
