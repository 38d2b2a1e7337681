"""`python -m tests.security.fuzz --messages N --seed S`: damaged messages at real processes, over real sockets.

Three quarters go to a replay, one quarter to a weight publisher. At the same time honest clients do their work and
check every answer. The endpoint of agents gets one request for a hundred messages. Ends with one line of JSON, or with
an error: what must hold is

- the process stays up, and its anonymous memory is flat after the first tenth of the messages;
- every message that is refused is answered with the reason, and counted;
- nothing honest is lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import zmq

from asyncrl.network.listener import PEER_MESSAGES
from asyncrl.network.sockets import connect
from asyncrl.wire import Message, encode
from tests.chaos.support import ReplayProcess, Target
from tests.security import honest
from tests.security.endpoint_fuzz import fuzz_endpoint
from tests.security.mutator import REPLAY_REQUESTS, WEIGHT_REQUESTS, Mutator
from tests.security.published import PublisherProcess

log = logging.getLogger("fuzz")

BATCH = PEER_MESSAGES // 2
"""More at once from one peer are not all answered."""
CONNECTIONS = 4
ANSWER_S = 60.0
MAX_GROWTH_MB = 16.0
FAST = (
    *("replay.max_lag=1000000", "replay.durability=os", "replay.lease_s=2", "scoring.timeout_s=1"),
    *("learner.group_size=2", "learner.batch_size=4", "learner.minibatches=1", "replay.max_attempts=1000"),
)
"""A replay that always has tickets, and whose leases end soon."""

REFUSED = bytes(encode(Message("refused"))[0][:10])


class Attack:
    """Sends a mutator's messages over several connections, a batch in flight on each, and counts refusals."""

    def __init__(self, target: Target, mutator: Mutator) -> None:
        self.refused = 0
        self.sent = 0
        self._target = target
        self._mutator = mutator
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = [connect(self._context, target.endpoint, None) for _ in range(CONNECTIONS)]

    def run(self, messages: int) -> None:
        """Send so many more messages; all that can be answered at once is answered when this returns."""
        end = self.sent + messages
        marks: dict[zmq.Socket[bytes], bytes] = {}
        for socket in itertools.cycle(self._sockets):
            if socket in marks:
                self._collect(socket, marks.pop(socket))
            if self.sent < end:
                marks[socket] = self._send(socket, min(BATCH, end - self.sent))
            elif not marks:
                return

    def _send(self, socket: zmq.Socket[bytes], count: int) -> bytes:
        """Send a batch, and then a request of an unknown kind, whose refusal comes last. Return the mark in it."""
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
                assert not lost, f"it answers no more:\n{self._target.log()[-3000:]}"
            header = socket.recv_multipart()[0]
            if header.startswith(REFUSED):
                self.refused += 1
                if mark in header:
                    return

    def close(self) -> None:
        self._context.destroy(linger=0)


def attacked(target: Target, mutator: Mutator, client: honest.Honest, messages: int) -> dict[str, Any]:
    """Send `messages` while `client` works, and check that the target stays up with its memory flat; the figures."""
    attack, started = Attack(target, mutator), time.monotonic()
    memory: list[float] = []
    """After each tenth of the messages."""
    try:
        for tenth in range(10):
            attack.run(messages * (tenth + 1) // 10 - attack.sent)
            memory.append(round(target.resident_bytes() / 2**20, 1))
            log.info("%s: %d of %d messages", type(target).__name__, attack.sent, messages)
    finally:
        attack.close()
    client.stop()
    seconds = time.monotonic() - started
    assert target.alive(), target.log()
    assert max(memory) - memory[0] < MAX_GROWTH_MB, f"anonymous memory grew, in MB: {memory}"
    assert client.rounds > 0
    return {
        "messages": messages,
        "refused": attack.refused,
        "seconds": round(seconds, 1),
        "messages_per_s": round(messages / seconds),
        "honest_rounds": client.rounds,
        "anonymous_mb": memory,
    }


def fuzz_replay(folder: Path, messages: int, seed: int) -> dict[str, Any]:
    """Raises AssertionError where a promise is broken."""
    with ReplayProcess(folder / "replay", *FAST) as target:
        client = honest.train(target.endpoint)
        figures = attacked(target, Mutator(REPLAY_REQUESTS, seed), client, messages)
        status = target.status()
        assert status["refused"] == figures["refused"], f"other refusals came than were counted: {figures}, {status}"
        with closing(target.client()) as observer:
            audit = observer.audit()
        assert audit["lost"] == 0, audit
        assert len(target.log()) < 100_000 + 200 * figures["seconds"], "the log grows with the refusals"
    return figures


def fuzz_publisher(folder: Path, messages: int, seed: int) -> dict[str, Any]:
    """Raises AssertionError where a promise is broken."""
    with PublisherProcess(folder / "publisher") as target:
        figures = attacked(target, Mutator(WEIGHT_REQUESTS, seed), honest.receive(target.endpoint), messages)
        refused = target.refused()
        assert refused == figures["refused"], f"{refused} refusals were counted, others came: {figures}"
    return figures


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    quarter = arguments.messages // 4
    with tempfile.TemporaryDirectory() as name:
        report = {
            **vars(arguments),
            "replay": fuzz_replay(Path(name), arguments.messages - quarter, arguments.seed),
            "publisher": fuzz_publisher(Path(name), quarter, arguments.seed),
            "endpoint": fuzz_endpoint(arguments.messages // 100, arguments.seed),
        }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
