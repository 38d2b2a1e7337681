"""Clients that do their work during the fuzz, and check every answer that they get."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import zmq.asyncio
from msgspec import structs

from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import RunIdentity, Trajectory
from asyncrl.weights.requests import Requests
from asyncrl.weights.zmq_route import ZmqRoute
from tests.helpers import OWN_RUN, make_labels, make_trajectory, until
from tests.security import published

ANSWER_S = 60.0
PAUSE_S = 0.02


class Honest:
    """Does `work` in a thread, again and again, until `stop`."""

    def __init__(self, work: Callable[[threading.Event, Callable[[], None]], None]) -> None:
        self.rounds = 0
        self._stopping = threading.Event()
        self._work = ThreadPoolExecutor().submit(work, self._stopping, self._count)

    def _count(self) -> None:
        self.rounds += 1

    def stop(self) -> None:
        """End after a whole round at least; raises what went wrong."""
        until(lambda: self.rounds or self._work.done(), ANSWER_S)
        self._stopping.set()
        self._work.result(2 * ANSWER_S)


def train(endpoint: str) -> Honest:
    """All the roles of a run in one: tickets, trajectories, labels, plans, checkpoints."""

    def work(stopping: threading.Event, count: Callable[[], None]) -> None:
        client = ReplayClient(endpoint, "honest", "1", give_up_s=ANSWER_S, run=RunIdentity("run"))
        generator, step = np.random.default_rng(0), 0
        try:
            while not stopping.wait(PAUSE_S):
                _one_step(client, generator, step)
                step += 1
                count()
        finally:
            client.close()

    return Honest(work)


def _one_step(client: ReplayClient, generator: np.random.Generator, step: int) -> None:
    sent: dict[str, Trajectory] = {}
    for ticket in client.tickets([], 4):
        trajectory = make_trajectory(ticket, ticket.min_version, length=int(generator.integers(4, 600)))
        trajectory = structs.replace(trajectory, tokens=generator.integers(0, 1 << 31, len(trajectory), np.int32))
        sent[ticket.id] = trajectory
        assert client.put(trajectory) == "stored"
        assert client.put(trajectory) == "duplicate"
    assert len(sent) == 4
    leases = client.lease(["rules"], 8, 1 << 20)
    assert {lease.trajectory.id for lease in leases} == sent.keys()
    for lease in leases:
        _same(lease.trajectory, sent[lease.trajectory.id])
    client.label([make_labels(lease.trajectory.id, float(len(lease.trajectory))) for lease in leases])
    plan = client.plan(step)
    assert plan is not None
    assert set(plan.ids) == sent.keys(), f"planned {plan}, sent {list(sent)}"
    for trajectory, labels in zip(client.fetch(plan.ids), client.labels(plan.ids), strict=True):
        _same(trajectory, sent[trajectory.id])
        assert (labels.trajectory_id, labels.reward) == (trajectory.id, len(trajectory))
    client.checkpointed(step + 1, step + 1)


def _same(got: Trajectory, sent: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert getattr(got, name).tobytes() == getattr(sent, name).tobytes()
    assert (got.group_id, got.member, got.turns) == (sent.group_id, sent.member, sent.turns)


def receive(endpoint: str) -> Honest:
    """An engine that fetches the published weights whole."""
    expected = published.tensors()

    async def run(stopping: threading.Event, count: Callable[[], None]) -> None:
        with zmq.asyncio.Context() as context:
            channel = ZmqRoute(Requests(endpoint, context, timeout_s=ANSWER_S, run=OWN_RUN))
            try:
                while not stopping.wait(PAUSE_S):
                    manifest = await channel.newer_than(-1)
                    assert manifest is not None
                    got = await channel.fetch(manifest)
                    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
                    count()
            finally:
                channel.reset()

    return Honest(lambda stopping, count: asyncio.run(run(stopping, count)))
