"""Measures the throughput of a durable replay, an actor's wait for a ticket, and the time of a restart.

- throughput: 8 producers take tickets and deliver ready-made trajectories over tcp, pipelined. Two scorers for each
  shard lease and label all of them, or one learner rank fetches them. The replay is a process of its own with fsync and
  group commit. `--shards 2` adds a run over two shards.
- limits of the machine, for the same bytes: ROUTER and DEALER with credits only, LMDB with fsync and 64 trajectories a
  transaction, and sequential writes with fdatasync.
- tickets: 1,000 connected actors request tickets in turn at a steady total rate, while each holds at most one.
- far: deliveries of one actor over a link of 50 ms each way, one trajectory a round trip and 32 at once.
- restart: the time from the start of a replay with many records to its first answer.
- `--ray PYTHON`: the plain alternative, a Ray actor with a deque of pickled samples, under a Python that has Ray.

Run it on a quiet machine. The load and the processor time are reported with the rates.

    python -m benchmarks.replay --tokens 8192 --count 8000 --shards 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from msgspec import structs

from asyncrl.ids import shard_of
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import Labels
from benchmarks import far, limits, restart, tickets
from benchmarks.record import write_result
from benchmarks.serving import OWN_RUN, Replay, load, replay
from benchmarks.wire import make_trajectory

PRODUCERS = 8
BATCH = 32
SCORERS = 2
LEASE = 256
LONGEST_S = 300.0
Spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Crew:
    """The shared state of the processes of one run: they start together, and report their processor seconds."""

    ready: Barrier
    spent: Queue[float]
    stored: Queue[list[str]]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.ready.wait()
        before = time.process_time()
        yield
        self.spent.put(time.process_time() - before)


def produce(crew: Crew, endpoint: str, worker: str, count: int, tokens: int, tell: bool) -> None:
    """Deliver `count` trajectories under tickets. With `tell`, their ids go to the consumer after the
    acknowledgement."""
    client = ReplayClient(endpoint, worker, "1", run=OWN_RUN)
    made = make_trajectory(tokens, version=0)
    with crew.at_work():
        while count:
            batch = [
                structs.replace(made, id=each.id, task_id=each.task.id, group_id=each.group_id, member=each.member)
                for each in client.tickets([], min(BATCH, count))
            ]
            assert set(client.put_all(batch)) == {"stored"}
            count -= len(batch)
            if tell:
                crew.stored.put([each.id for each in batch])
    client.close()


def score(crew: Crew, endpoint: str, worker: str, count: int) -> None:
    """Lease and label `count` trajectories, as a scorer does."""
    client = ReplayClient(endpoint, worker, "1", run=OWN_RUN)
    with crew.at_work():
        while count:
            leases = client.lease(["rules"], min(LEASE, count), 1 << 30)
            client.label([Labels(each.trajectory.id, 1.0, 1.0, "benchmark") for each in leases])
            count -= len(leases)
    client.close()


def fetch(crew: Crew, endpoints: list[str], count: int) -> None:
    """Fetch `count` trajectories as they are acknowledged, as a learner rank does."""
    clients = [ReplayClient(endpoint, "learner", "1", run=OWN_RUN) for endpoint in endpoints]
    with crew.at_work():
        while count:
            names = crew.stored.get()
            count -= len(clients[shard_of(names[0], len(clients))].fetch(names))
    for client in clients:
        client.close()


def throughput(served: Replay, mode: str, count: int, tokens: int) -> dict[str, Any]:
    """Measure rates and processor time of one run. `mode` is lease or fetch."""
    shards, share = served.endpoints, count // PRODUCERS
    total = share * PRODUCERS
    consumers = SCORERS * len(shards) if mode == "lease" else 1
    crew = Crew(Spawn.Barrier(PRODUCERS + consumers + 1), Spawn.Queue(), Spawn.Queue())

    def start(work: Callable[..., None], *arguments: Any) -> SpawnProcess:
        process = Spawn.Process(target=work, args=(crew, *arguments), daemon=True)
        process.start()
        return process

    producing = [
        start(produce, shards[i % len(shards)], f"actor-{i}", share, tokens, mode == "fetch") for i in range(PRODUCERS)
    ]
    consuming = (
        [start(score, shards[i % len(shards)], f"scorer-{i}", total // consumers) for i in range(consumers)]
        if mode == "lease"
        else [start(fetch, shards, total)]
    )
    before = served.cpu()
    crew.ready.wait()
    started = time.perf_counter()
    spent = [crew.spent.get(timeout=LONGEST_S) for _ in producing]
    acknowledged = time.perf_counter() - started
    spent += [crew.spent.get(timeout=LONGEST_S) for _ in consuming]
    seconds = time.perf_counter() - started
    for process in (*producing, *consuming):
        process.join()
    return {
        "mode": mode,
        "shards": len(shards),
        "trajectories": total,
        "per_s": total / seconds,
        "mb_per_s": total * len_bytes(tokens) / seconds / 1e6,
        "acknowledged_per_s": total / acknowledged,
        "replay_cpu_us": (served.cpu() - before) / total * 1e6,
        "clients_cpu_us": sum(spent) / total * 1e6,
        "load": load(),
    }


def len_bytes(tokens: int) -> int:
    """Bytes of one trajectory on the wire without its header: tokens and log-probs."""
    return 8 * tokens


def in_folder(root: Path, work: Callable[[Path], Any]) -> Any:
    """Return the result of `work` in a temporary folder."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        return work(Path(folder))


def through_replay(folder: Path, shards: int, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    with replay(folder, shards) as served:
        return throughput(served, mode, options.count, options.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a trajectory")
    parser.add_argument("--count", type=int, default=8000, help="trajectories of a throughput run")
    parser.add_argument("--shards", type=int, default=2, help="shards of the second throughput run")
    parser.add_argument("--facts", type=int, default=100_000, help="trajectories in the store of the restarted replay")
    parser.add_argument("--only", nargs="+", default=["throughput", "limits", "tickets", "far", "restart"])
    parser.add_argument("--ray", help="a Python that has Ray, for the plain alternative")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks"), help="a folder on the disk to be measured")
    options = parser.parse_args()
    result: dict[str, Any] = {"tokens": options.tokens, "load": load()}

    def show(name: str, figures: dict[str, Any]) -> None:
        result.setdefault(name, []).append(figures)
        print(name, json.dumps({key: round(v, 2) if isinstance(v, float) else v for key, v in figures.items()}))

    if "limits" in options.only:
        for figures in in_folder(options.dir, lambda folder: list(limits.measure(folder, len_bytes(options.tokens)))):
            show("limits", figures)
    if "throughput" in options.only:
        for shards in sorted({1, options.shards}):
            for mode in ("lease", "fetch"):
                show(
                    "throughput",
                    in_folder(options.dir, partial(through_replay, shards=shards, mode=mode, options=options)),
                )
    if "tickets" in options.only:
        for durability in ("fsync", "os"):
            show("tickets", in_folder(options.dir, partial(tickets.measure, durability=durability)))
    if "far" in options.only:
        show("far", in_folder(options.dir, partial(far.measure, tokens=options.tokens)))
    if "restart" in options.only:
        show("restart", in_folder(options.dir, lambda folder: restart.measure(folder, options.facts)))
    if options.ray:
        command = [options.ray, str(Path(__file__).with_name("ray_deque.py")), str(options.tokens), str(options.count)]
        show(
            "ray",
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]),
        )
    else:
        print("ray: left out; name a Python that has Ray with --ray PYTHON")
    print(f"written to {write_result('replay', result)}")


if __name__ == "__main__":
    main()
