"""Measures an actor's wait for a ticket when a thousand actors are connected."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from asyncrl.replay.messages import TICKETS, decode_reply, encode_request
from asyncrl.replay.protocol import GetTickets
from benchmarks.serving import OWN_RUN, load, replay

ACTORS = 1000
RATE = 400
SECONDS = 10.0
WARM_UP = ACTORS


def measure(folder: Path, durability: str) -> dict[str, Any]:
    """Measure round trips of `ACTORS` connections that send requests in turn, `RATE` a second in all. Each connection
    alternates between a request for a new ticket and the renewal of its ticket."""
    with replay(folder, settings=[f"replay.durability={durability}"]) as served, zmq.Context() as context:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        context.max_sockets = 2 * ACTORS
        sockets = [context.socket(zmq.DEALER) for _ in range(ACTORS)]
        for socket in sockets:
            socket.linger = 0
            socket.connect(served.endpoints[0])
        before = served.cpu()
        waits = ask(sockets, round(RATE * SECONDS) + WARM_UP)
        cpu = served.cpu() - before
        context.destroy()
    waits["both"] = [*waits["ticket"], *waits["renewal"]]
    figures: dict[str, Any] = {"durability": durability, "actors": ACTORS, "rate_per_s": RATE}
    figures["replay_cpu_us"] = cpu / (round(RATE * SECONDS) + WARM_UP) * 1e6
    for kind, values in waits.items():
        for percent in (50, 90, 99):
            figures[f"{kind}_p{percent}_ms"] = float(np.percentile(values, percent)) * 1e3
    return {**figures, "load": load()}


def ask(sockets: list[zmq.Socket[bytes]], count: int) -> dict[str, list[float]]:
    """Seconds from request to reply, of new tickets and of renewals, without the first round, in which all connect.

    Requests are sent on time, without waiting for earlier replies.
    """
    held: dict[int, list[str]] = defaultdict(list)
    sent: dict[int, tuple[float, str]] = {}
    waits: dict[str, list[float]] = {"ticket": [], "renewal": []}
    poller, started, asked, answered = zmq.Poller(), time.perf_counter(), 0, 0
    while answered < count:
        due = started + asked / RATE
        left = due - time.perf_counter() if asked < count else 0.1
        for socket, _ in poller.poll(max(0, int(left * 1e3))) if sent else _sleep(left):
            actor = sockets.index(socket)
            reply = decode_reply(socket.recv_multipart())
            when, kind = sent.pop(actor)
            poller.unregister(socket)
            answered += 1
            held[actor] += [ticket.id for ticket in reply.read(TICKETS)]
            if reply.sequence >= WARM_UP:
                waits[kind].append(time.perf_counter() - when)
        if asked < count and time.perf_counter() >= due and (actor := asked % len(sockets)) not in sent:
            want = 1 - asked // len(sockets) % 2
            request = GetTickets(f"actor-{actor}", "1", held[actor], [], want)
            sockets[actor].send_multipart(encode_request(request, asked, OWN_RUN))
            sent[actor] = (time.perf_counter(), "ticket" if want else "renewal")
            poller.register(sockets[actor], zmq.POLLIN)
            asked += 1
    return waits


def _sleep(seconds: float) -> list[tuple[zmq.Socket[bytes], int]]:
    time.sleep(max(0.0, seconds))
    return []
