"""Measures how far the clock of a replay is ahead of this process's own, for the spans of both on one timeline."""

from __future__ import annotations

from asyncrl.observe.spans import Spans
from asyncrl.replay import protocol
from asyncrl.replay.protocol import OK, Answer, GetClock, encode_request
from asyncrl.wire import Buffer

PROBE_S = 2.0


class ClockProbe:
    """One client's requests for the clock of the replay at `endpoint`. Each goes along with other requests, so that no
    caller waits for it. If `spans` record nothing, none is ever due."""

    def __init__(self, endpoint: str, spans: Spans) -> None:
        self._endpoint = endpoint
        self._spans = spans
        self._due = spans.clock() if spans.records else float("inf")
        self._sequence = 0
        self._sent = 0.0

    def is_due(self) -> bool:
        return self._spans.clock() >= self._due

    def message(self, sequence: int) -> list[Buffer]:
        """The request, which has this number."""
        self._sequence, self._due = sequence, self._spans.clock() + PROBE_S
        return encode_request(GetClock(), sequence)

    def sends(self, sequence: int) -> None:
        """The message of this number leaves now, perhaps once more."""
        if sequence == self._sequence:
            self._sent = self._spans.clock()

    def received(self, answer: Answer) -> None:
        """An answer has arrived, to any request."""
        if answer.sequence == self._sequence and answer.kind == OK:
            theirs = answer.read(protocol.SECONDS)
            self._spans.measured_clock(self._endpoint, self._sent, theirs, self._spans.clock())
