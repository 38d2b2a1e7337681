"""An actor inside the monkey that keeps its own book of what the replay acknowledged, and misbehaves now and then.

Its trajectories are made up. It delivers some twice, abandons some tickets, and now and then starts again without
notice.
"""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import zmq

from asyncrl.errors import StoppedError
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import RunIdentity, Ticket
from tests.helpers import make_trajectory

LENGTH = 40
LONGEST_EPISODE_S = 1.0


class Witness:
    """Works for one shard at `endpoint` in a thread of its own, from construction until `close`."""

    def __init__(self, endpoint: str, name: str, seed: str) -> None:
        self._endpoint = endpoint
        self._name = name
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acknowledged: set[str] = set()
        self.broken_promises: list[str] = []
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, suppress(StoppedError):
            while not self._stop.is_set():
                self._live(context)

    def _live(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """One incarnation, which may end with tickets in its hands."""
        life = f"{self._rng.random()}"
        client = ReplayClient(self._endpoint, self._name, life, self._stop, context=context, run=RunIdentity("run"))
        try:
            while self._rng.random() > 0.05:
                for ticket in client.tickets([], 2):
                    self._stop.wait(self._rng.random() * LONGEST_EPISODE_S)
                    if self._rng.random() > 0.1:
                        self._deliver(client, ticket)
        finally:
            client.close()

    def _deliver(self, client: ReplayClient, ticket: Ticket) -> None:
        trajectory = make_trajectory(ticket, ticket.min_version, LENGTH)
        results = [client.put(trajectory)]
        if results[0] != "late":
            self.acknowledged.add(ticket.id)
            if self._rng.random() < 0.3:
                results.append(client.put(trajectory))
        if results[1:] not in ([], ["duplicate"]):
            self.broken_promises.append(f"{ticket.id} was {results[0]}, then {results[1]}")
