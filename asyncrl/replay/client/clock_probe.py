"""Measures the offset between the clocks of a replay and of this process, to show the spans of both on one timeline."""

from __future__ import annotations

from asyncrl.observe.spans import Spans
from asyncrl.replay import messages
from asyncrl.replay.messages import OK, Answer, encode_request
from asyncrl.replay.protocol import GetClock
from asyncrl.wire import Buffer

PROBE_S = 2.0


class ClockProbe:
    """Asks the replay at `endpoint` for its time. These requests are sent together with a client's other requests, so
    that no caller waits for them. If `spans` record nothing, no request is ever due."""

    def __init__(self, endpoint: str, spans: Spans) -> None:
        self._endpoint = endpoint
        self._spans = spans
        self._due = spans.clock() if spans.records else float("inf")
        self._sequence = 0
        self._sent = 0.0

    def is_due(self) -> bool:
        return self._spans.clock() >= self._due

    def message(self, sequence: int) -> list[Buffer]:
        """The request, with the number `sequence`."""
        self._sequence, self._due = sequence, self._spans.clock() + PROBE_S
        return encode_request(GetClock(), sequence)

    def sends(self, sequence: int) -> None:
        """Note that the message with this number is sent now. If the message is tried again, the newest time counts."""
        if sequence == self._sequence:
            self._sent = self._spans.clock()

    def received(self, answer: Answer) -> None:
        """Note that an answer has arrived. Answers to other requests than those of this object are ignored."""
        if answer.sequence == self._sequence and answer.kind == OK:
            theirs = answer.read(messages.SECONDS)
            self._spans.measured_clock(self._endpoint, self._sent, theirs, self._spans.clock())
