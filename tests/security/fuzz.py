"""`python -m tests.security.fuzz --messages N --seed S`: damaged messages at real processes, over real sockets.

Three quarters go to a replay, one quarter to a weight publisher. Beside them honest clients do their work and check
every answer. Ends with one line of JSON, or with an error: what must hold is

- the process stays up, and its anonymous memory is flat after the first tenth of the messages;
- every message that is refused is answered with the reason, and counted;
- nothing honest is lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from asyncrl.network.listener import PEER_MESSAGES
from asyncrl.network.sockets import connect
from asyncrl.wire import Message, encode
from tests.security import honest, targets
from tests.security.mutator import REPLAY_REQUESTS, WEIGHT_REQUESTS, Mutator

BATCH = PEER_MESSAGES // 2
"""More at once from one peer are not all answered."""
CONNECTIONS = 4
ANSWER_S = 60.0
MAX_GROWTH_MB = 16.0
PROGRESS_S = 5.0

REFUSED = bytes(encode(Message("refused"))[0][:10])


@dataclass
class Result:
    """What became of one target."""

    messages: int
    refused: int
    seconds: float
    honest_rounds: int
    memory_mb: list[float]
    """Anonymous memory after each tenth of the messages."""


class Attack:
    """Sends a mutator's messages over several connections, a batch in flight on each, and counts refusals."""

    def __init__(self, target: targets.Target, mutator: Mutator) -> None:
        self.refused = 0
        self.sent = 0
        self._target = target
        self._mutator = mutator
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = [connect(self._context, target.endpoint, None) for _ in range(CONNECTIONS)]

    def run(self, messages: int, progress: Callable[[int], None]) -> None:
        """Send so many more messages; all that can be answered at once is answered when this returns."""
        end = self.sent + messages
        marks: dict[zmq.Socket[bytes], bytes] = {}
        for socket in itertools.cycle(self._sockets):
            if socket in marks:
                self._collect(socket, marks.pop(socket))
            if self.sent < end:
                marks[socket] = self._send(socket, min(BATCH, end - self.sent))
                progress(self.sent)
            elif not marks:
                return

    def _send(self, socket: zmq.Socket[bytes], count: int) -> bytes:
        """A batch, and behind it a request of an unknown kind: its refusal has the mark, and comes last."""
        for _ in range(count):
            socket.send_multipart(self._mutator.message())
        self.sent += count
        socket.send_multipart(encode(Message(f"marker-{self.sent}")))
        return f"'marker-{self.sent}'".encode()

    def _collect(self, socket: zmq.Socket[bytes], mark: bytes) -> None:
        """Count refusals until that with the mark."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            while not socket.poll(1000):
                lost = not self._target.alive() or time.monotonic() > deadline
                assert not lost, f"it answers no more:\n{self._target.log[-3000:]}"
            header = socket.recv_multipart()[0]
            if header.startswith(REFUSED):
                self.refused += 1
                if mark in header:
                    return

    def close(self) -> None:
        self._context.destroy(linger=0)


def attacked(
    target: targets.Target, mutator: Mutator, client: honest.Honest, messages: int, progress: Callable[[int], None]
) -> Result:
    """Send `messages` while `client` works, and check that the target stays up with its memory flat."""
    attack, started = Attack(target, mutator), time.monotonic()
    memory: list[float] = []
    try:
        for tenth in range(10):
            attack.run(messages * (tenth + 1) // 10 - attack.sent, progress)
            memory.append(round(target.anonymous_mb, 1))
    finally:
        attack.close()
    client.stop()
    assert target.alive(), target.log
    assert max(memory) - memory[0] < MAX_GROWTH_MB, f"anonymous memory grew, in MB: {memory}"
    assert client.rounds > 0
    return Result(messages, attack.refused, time.monotonic() - started, client.rounds, memory)


def fuzz_replay(folder: Path, messages: int, seed: int, progress: Callable[[int], None] = lambda sent: None) -> Result:
    """Raises AssertionError where a promise is broken."""
    with targets.replay(folder) as target:
        client = honest.train(target.endpoint)
        result = attacked(target, Mutator(REPLAY_REQUESTS, seed), client, messages, progress)
        counted, audit = targets.asked(target, "status")["refused"], targets.asked(target, "audit")
        assert counted == result.refused, f"{result.refused} refusals came, {counted} were counted"
        assert audit["lost"] == 0, audit
        assert len(target.log) < 100_000 + 200 * result.seconds, "the log grows with the refusals"
    return result


def fuzz_publisher(
    folder: Path, messages: int, seed: int, progress: Callable[[int], None] = lambda sent: None
) -> Result:
    """Raises AssertionError where a promise is broken."""
    with targets.publisher(folder) as target:
        client = honest.receive(target.endpoint)
        result = attacked(target, Mutator(WEIGHT_REQUESTS, seed), client, messages, progress)
        counted = targets.publisher_refused(target)
        assert counted == result.refused, f"{result.refused} refusals came, {counted} were counted"
    return result


class Progress:
    """A line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = 0.0

    def __call__(self, sent: int) -> None:
        if time.monotonic() >= self._next:
            sys.stderr.write(f"{self._what}: {sent} messages\n")
            self._next = time.monotonic() + PROGRESS_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    quarter = arguments.messages // 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "replay": fuzz_replay(folder, arguments.messages - quarter, arguments.seed, Progress("replay")),
            "publisher": fuzz_publisher(folder, quarter, arguments.seed, Progress("publisher")),
        }
    report = {
        name: {
            "messages": result.messages,
            "refused": result.refused,
            "seconds": round(result.seconds, 1),
            "messages_per_s": round(result.messages / result.seconds),
            "honest_rounds": result.honest_rounds,
            "anonymous_mb": result.memory_mb,
        }
        for name, result in results.items()
    }
    sys.stdout.write(json.dumps({"messages": arguments.messages, "seed": arguments.seed, **report}) + "\n")


if __name__ == "__main__":
    main()
