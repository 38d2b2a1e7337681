"""Measures how long a run takes to start under Ray, and a replay with a thousand connected actors.

- `--start`: seconds from the command to the first trained step of `asyncrl train`, with and without
  `cluster.launcher=ray` and a new Ray cluster on this machine. Needs Ray, and the demo's files (`asyncrl demo`).
- `--actors` (the default): 1,000 simulated actors, then 10, deliver at the same total rate. Each has its own socket. It
  waits instead of generating. 8 processes share the actors. A scorer labels the trajectories. Reported are the waits
  for new tickets and the replay's processor time a trajectory, including renewals, once all actors are connected.

Run it on a quiet machine. The load is reported.

    python -m benchmarks.cluster --start --actors
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from msgspec import structs

from asyncrl.commands.demo.prepare import CACHE, SEED, prepare_demo, prepared_overrides
from asyncrl.config.schema import ReplayConfig
from asyncrl.errors import StoppedError
from asyncrl.observe.sinks import metrics_file
from asyncrl.replay.client.client import RENEWALS_PER_LEASE, ReplayClient
from asyncrl.replay.messages import OK, TICKETS, decode_reply, encode_request
from asyncrl.replay.protocol import GetTickets, PutTrajectory, ReplayRequest
from asyncrl.runs.lines import read_lines
from asyncrl.types import Labels, Ticket
from asyncrl.wire import Buffer, encode, trajectory_message
from benchmarks.record import write_result
from benchmarks.serving import OWN_RUN, load, replay
from benchmarks.wire import make_trajectory

PROCESSES = 8
RENEW_S = ReplayConfig.lease_s / RENEWALS_PER_LEASE
"""Seconds between the renewals of an actor's tickets."""
TOKENS = 512
LONGEST_S = 600.0
Spawn = multiprocessing.get_context("spawn")


@dataclass
class _Actor:
    """A simulated actor, always connected, which holds one ticket for the time of an episode."""

    name: str
    socket: zmq.Socket[bytes]
    held: Ticket | None = None
    done_at: float = 0.0
    asked_at: float = 0.0
    waits: list[float] = field(default_factory=list)

    def send(self, request: ReplayRequest, frames: Sequence[Buffer] = ()) -> None:
        self.socket.send_multipart(encode_request(request, 1, OWN_RUN, frames))

    def ask(self, want: int) -> None:
        self.asked_at = time.perf_counter()
        held = [self.held.id] if self.held is not None else []
        self.send(GetTickets(self.name, "1", held, [], want))


def act(
    endpoint: str, names: list[str], episode_s: float, seconds: float, ready: Barrier, told: Queue[dict[str, Any]]
) -> None:
    """Simulate the actors of one process: each takes a ticket, keeps it for `episode_s` on average, delivers, and takes
    the next. Times are 0.5 to 1.5 times `episode_s`, so that actors do not stay in step. The first `episode_s`, in
    which all actors connect, do not count."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    context = zmq.Context()
    context.max_sockets = 2 * len(names) + 16
    poller, made = zmq.Poller(), make_trajectory(TOKENS, version=0)
    actors: dict[Any, _Actor] = {}
    for name in names:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(endpoint)
        actors[socket] = _Actor(name, socket)
        poller.register(socket, zmq.POLLIN)
    rng = np.random.default_rng(sum(names[0].encode()))
    ready.wait()
    started = time.perf_counter()
    begin = started + episode_s
    due: list[tuple[float, int, Any]] = []
    for number, socket in enumerate(actors):
        heappush(due, (started + episode_s * rng.random(), number, socket))
    number, delivered = len(actors), 0
    while (now := time.perf_counter()) < begin + seconds:
        while due and due[0][0] <= now:
            socket = heappop(due)[2]
            actor = actors[socket]
            if actor.held is None:
                actor.ask(1)
            elif actor.done_at > now:
                actor.ask(0)
            else:
                ticket, actor.held = actor.held, None
                episode = structs.replace(
                    made, id=ticket.id, task_id=ticket.task.id, group_id=ticket.group_id, member=ticket.member
                )
                actor.send(PutTrajectory(0), encode(trajectory_message(episode)))
                actor.asked_at = 0.0
        wait_s = min(due[0][0] if due else now + 0.1, now + 0.1) - now
        for socket, _ in poller.poll(max(0, int(wait_s * 1000))):
            actor, now = actors[socket], time.perf_counter()
            reply = decode_reply(socket.recv_multipart())
            number += 1
            if not actor.asked_at:
                delivered += now >= begin
                heappush(due, (now, number, socket))
            elif actor.held is None:
                tickets = reply.read(TICKETS) if reply.kind == OK else []
                if tickets:
                    if actor.asked_at >= begin:
                        actor.waits.append(now - actor.asked_at)
                    actor.held, actor.done_at = tickets[0], now + episode_s * rng.uniform(0.5, 1.5)
                heappush(due, (min(actor.done_at, now + RENEW_S) if tickets else now, number, socket))
            else:
                heappush(due, (min(actor.done_at, now + RENEW_S), number, socket))
    told.put({"waits": [wait for each in actors.values() for wait in each.waits], "delivered": delivered})
    context.destroy()


def score(endpoint: str, stop: threading.Event) -> None:
    """Label everything until `stop`."""
    client = ReplayClient(endpoint, "scorer", "1", stop, run=OWN_RUN)
    try:
        while True:
            leases = client.lease(["rules"], 256, 1 << 30)
            client.label([Labels(each.trajectory.id, 1.0, 1.0, "benchmark") for each in leases])
    except StoppedError:
        client.close()


def crowd(folder: Path, actors: int, rate: float, seconds: float) -> dict[str, Any]:
    """Measure that many actors, which together deliver `rate` trajectories a second."""
    processes, episode_s = min(PROCESSES, actors), actors / rate
    with replay(folder) as served:
        ready, told = Spawn.Barrier(processes + 1), Spawn.Queue()
        names = [f"actor-{number}" for number in range(actors)]
        working = [
            Spawn.Process(
                target=act,
                args=(served.endpoints[0], names[index::processes], episode_s, seconds, ready, told),
                daemon=True,
            )
            for index in range(processes)
        ]
        for process in working:
            process.start()
        stop = threading.Event()
        scorer = threading.Thread(target=score, args=(served.endpoints[0], stop))
        scorer.start()
        ready.wait(LONGEST_S)
        time.sleep(episode_s)
        before = served.cpu()
        results = [told.get(timeout=LONGEST_S) for _ in working]
        cpu = served.cpu() - before
        stop.set()
        scorer.join()
        for process in working:
            process.join()
    waits = [wait for result in results for wait in result["waits"]]
    delivered = sum(result["delivered"] for result in results)
    figures = {f"ticket_p{percent}_ms": float(np.percentile(waits, percent)) * 1e3 for percent in (50, 90, 99)}
    return {
        "actors": actors,
        "delivered_per_s": delivered / seconds,
        **figures,
        "replay_cpu_us_per_trajectory": cpu / delivered * 1e6,
        "load": load(),
    }


def first_step_s(folder: Path, overrides: Sequence[str]) -> float:
    """Seconds from the command to the learner's first step."""
    command = [sys.executable, "-m", "asyncrl", "train", *overrides, f"run.dir={folder}", "run.name=run"]
    started = time.perf_counter()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        )
        try:
            while not read_lines(metrics_file(folder / "run", "learner")):
                if process.poll() is not None:
                    raise RuntimeError(f"the run ended:\n{(folder / 'output').read_text()}")
                time.sleep(0.05)
            return time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def starts(rounds: int) -> Iterator[dict[str, Any]]:
    """Time the start of the demo under each launcher, alternately."""
    demo = prepared_overrides(prepare_demo(CACHE, SEED, lambda _: None))
    for _ in range(rounds):
        for launcher in ("local", "ray"):
            with tempfile.TemporaryDirectory() as folder:
                seconds = first_step_s(Path(folder), [*demo, f"cluster.launcher={launcher}"])
                yield {"launcher": launcher, "first_step_s": seconds, "load": load()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", action="store_true", help="the start under each launcher")
    parser.add_argument("--actors", action="store_true", help="a thousand actors")
    parser.add_argument("--rate", type=float, default=200.0, help="trajectories a second in all (200)")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured seconds for each number of actors (30)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each launcher (3)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}, flush=True)

    if options.start:
        for row in starts(options.rounds):
            tell(row)
    if options.actors or not options.start:
        for count in (1000, 10):
            with tempfile.TemporaryDirectory() as folder:
                tell(crowd(Path(folder), count, options.rate, options.seconds))
    print(write_result("cluster", rows))


if __name__ == "__main__":
    main()
