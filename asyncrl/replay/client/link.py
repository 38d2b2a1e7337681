"""A lasting connection to the replay: each request is sent again until it is answered, even after broken connections
and restarts of the replay.

The replay recognises a repeated request by its ids. So each request takes effect exactly once, although it may be sent
many times. Back-pressure: at most CREDITS requests, with at most CREDIT_BYTES in total, are unanswered, and further
requests wait in the client.

Requests are sent in rounds, and a request gets a new number in each round. A round ends when every sent request is
answered. If the replay could not take some requests, the next round sends all of these again after one wait. So an
outage of the replay's disk delays a client by the length of the outage and at most BUSY_S more.

A link belongs to one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from asyncrl.errors import RefusedError, StoppedError, UnavailableError
from asyncrl.network.keys import CHECK_KEYS, ClientKeys
from asyncrl.network.sockets import Watch, connect, try_send
from asyncrl.network.throttle import Throttled
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.replay.client.clock_probe import ClockProbe
from asyncrl.replay.messages import BUSY, REFUSED, Answer, decode_reply, encode_request
from asyncrl.replay.protocol import ReplayRequest
from asyncrl.types import RunIdentity
from asyncrl.wire import Buffer

log = logging.getLogger(__name__)

RETRY_S = 5.0
BUSY_S = 1.0
"""The wait after a round in which the replay could not take a request, for example because its disk was full."""
BREAK_S = 0.1
"""The wait after a broken connection. It doubles up to RETRY_S while further connections break without an answer."""
POLL_MS = 100
CREDITS = 32
CREDIT_BYTES = 2 << 20
"""Limits on the number and bytes of the unanswered requests of one link. A single request may be larger."""

Request = tuple[ReplayRequest, Sequence[Buffer]]
"""A request with its raw frames."""


class ReplayLink:
    """The link of `worker` to the replay at `endpoint`. `clock` gives monotonic seconds. All other arguments are those
    of ReplayClient."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._worker = worker
        self._stop = stop or threading.Event()
        self._give_up_s = give_up_s
        self._context = context or zmq.Context.instance()
        self._keys = keys
        self._run = run
        self._retry_s = retry_s
        self._clock = clock
        self._sequence = 0
        self._break_s = BREAK_S
        self._put_off = ""
        self._delays = Throttled(log, f"{worker} waits for the replay at {endpoint}", clock=clock)
        self._probe = ClockProbe(endpoint, spans or NoSpans())
        self._connect()

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = connect(self._context, self._endpoint, self._keys)
        self._watch = Watch(self._socket)

    def close(self) -> None:
        self._watch.close()
        self._socket.close()

    def answers(self, requests: Sequence[Request], credits: int = CREDITS) -> list[Answer]:
        """Send requests, and return the answer to each. At most `credits` requests are unanswered at a time.

        Raises StoppedError: `stop` was set. UnavailableError: no answer came within `give_up_s`. RefusedError: the
        replay could not read the header of a request. WireError: a request cannot be encoded. Then none of the requests
        was sent."""
        started, self._put_off = self._clock(), ""
        answers: dict[int, Answer] = {}
        rest = list(range(len(requests)))
        while rest:
            numbered = {self._next_number(): at for at in rest}
            messages = {number: self._encode(requests[at], number) for number, at in numbered.items()}
            found = self._round(messages, credits, started)
            answered = {at: found[number] for number, at in numbered.items() if number in found}
            busy = [at for at, answer in answered.items() if answer.kind == BUSY]
            answers |= {at: answer for at, answer in answered.items() if answer.kind != BUSY}
            # Unsent requests go first: the replay may be able to take them.
            rest = [at for at in rest if at not in answered] + busy
            if busy:
                self._put_off = answered[busy[0]].reason
                self._delays.say(f"{self._put_off}; the request is sent again")
                self._stop.wait(min(BUSY_S, self._retry_s))
        return [answers[at] for at in range(len(requests))]

    def _next_number(self) -> int:
        self._sequence += 1
        return self._sequence

    def _encode(self, request: Request, number: int) -> list[Buffer]:
        return encode_request(request[0], number, self._run, request[1])

    def _round(self, messages: Mapping[int, list[Buffer]], credits: int, started: float) -> dict[int, Answer]:
        """Send each message once, as credits allow, and return the answers. The round ends when all messages are
        answered, or when the replay is busy and all sent messages are answered. It also ends when a new connection is
        made, since old answers cannot arrive on the new connection."""
        unsent, away, found = deque(messages.items()), dict[int, int](), dict[int, Answer]()
        if self._probe.is_due():
            number = self._next_number()
            unsent.appendleft((number, self._probe.message(number)))
        self._watch.broke()
        deadline = self._clock() + self._retry_s
        while unsent or away:
            self._send(unsent, away, credits)
            if self._clock() > deadline:
                self._reconnect(started)
                break
            answer = self._receive(started)
            if answer is None:
                if self._watch.broke():
                    self._stop.wait(self._break_s)
                    self._break_s = min(self._retry_s, 2 * self._break_s)
                    self._reconnect(started)
                    break
                continue
            if answer.sequence not in away:
                self._raise_refusal(answer)
                continue
            deadline = self._clock() + self._retry_s
            self._break_s = BREAK_S
            self._probe.received(answer)
            found[answer.sequence] = answer
            del away[answer.sequence]
            if answer.kind == BUSY:
                unsent.clear()
        return found

    def _send(self, unsent: deque[tuple[int, list[Buffer]]], away: dict[int, int], credits: int) -> None:
        while unsent and _credit(away, credits):
            number, frames = unsent[0]
            self._probe.sends(number)
            if not try_send(self._socket, frames, copy=False):
                return
            away[number] = sum(map(len, frames))
            unsent.popleft()

    def _raise_refusal(self, answer: Answer) -> None:
        """Raise RefusedError if the replay could not read the header of a message."""
        if answer.sequence == 0 and answer.kind == REFUSED:
            # The replay may refuse every unanswered message in this way, so take a new connection.
            self._renew()
            raise RefusedError(f"the replay refused: {answer.reason}")

    def _receive(self, started: float) -> Answer | None:
        """The next message. `None` if none arrives within POLL_MS."""
        if self._stop.is_set():
            raise StoppedError("stopped while waiting for the replay")
        if self._give_up_s is not None and self._clock() - started > self._give_up_s:
            said = f"; its last reply was: {self._put_off}" if self._put_off else ""
            raise UnavailableError(
                f"no answer from the replay at {self._endpoint} within {self._give_up_s:.0f} s{said}"
            )
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:  # A poll costs more than an attempt to receive, and most replies come in bursts.
            if not self._socket.poll(POLL_MS):
                return None
            frames = self._socket.recv_multipart(copy=False)
        return decode_reply([frame.buffer for frame in frames])

    def _reconnect(self, started: float) -> None:
        """Log the wait and open a new connection, since the old one may be dead."""
        advice = f"; {CHECK_KEYS}" if self._keys else ""
        waited = self._clock() - started
        log.warning("%s has waited for the replay at %s for %.0f s%s", self._worker, self._endpoint, waited, advice)
        self._renew()

    def _renew(self) -> None:
        self.close()
        self._connect()


def _credit(away: Mapping[int, int], credits: int) -> bool:
    """True if one more request may be sent. `away` has the bytes of each unanswered request."""
    return not away or (len(away) < credits and sum(away.values()) < CREDIT_BYTES)
