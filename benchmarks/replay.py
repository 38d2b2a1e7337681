"""How many trajectories a second does a durable replay take and give, and how long does an actor wait for a ticket?

- throughput: 8 producers take tickets and deliver ready-made trajectories under their ids over tcp, each with its deliveries
  pipelined, while one consumer gets them all: as a scorer (lease and label), or as a learner (plain fetch). The replay is a
  process of its own with fsync and group commit. With `--shards 2` once more over two.
- limits of the machine, for the same bytes: ROUTER and DEALER with credits and nothing behind them, LMDB with fsync and 64
  trajectories a transaction, and sequential writes with fdatasync.
- tickets: 1,000 connected actors in turn, at a steady total rate, ask for a ticket while each holds one or none.
- restart: how long a replay with many facts takes from its start to its first answer.
- `--ray PYTHON`: the plain alternative, a Ray actor with a deque of pickled samples, under a Python that has Ray.

Other processes disturb all of it: the load is reported, and processor time beside the rates.

    python -m benchmarks.replay --tokens 8192 --count 8000 --shards 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from asyncrl.replay.client import ReplayClient
from asyncrl.replay.shards import shard_of
from asyncrl.types import Labels
from benchmarks import limits, restart, tickets
from benchmarks.record import write_result
from benchmarks.serving import Replay, load, replay
from benchmarks.wire import make_trajectory

PRODUCERS = 8
BATCH = 32
LEASE = 128
Spawn = multiprocessing.get_context("spawn")


def produce(endpoint: str, worker: str, count: int, tokens: int, ready: Barrier, stored: Queue[Any] | None) -> None:
    """Deliver `count` trajectories under tickets; their ids go to `stored` once they are acknowledged."""
    client = ReplayClient(endpoint, worker, "1")
    made = make_trajectory(tokens)
    ready.wait()
    while count:
        batch = [
            replace(made, id=each.id, task_id=each.task.id, group_id=each.group_id, member=each.member)
            for each in client.tickets([], min(BATCH, count))
        ]
        assert set(client.put_all(batch)) == {"stored"}
        count -= len(batch)
        if stored is not None:
            stored.put([each.id for each in batch])
    client.close()


def score(endpoint: str, worker: str, count: int, ready: Barrier) -> None:
    """Lease and label `count` trajectories, as a scorer does."""
    client = ReplayClient(endpoint, worker, "1")
    ready.wait()
    while count:
        leases = client.lease(["rules"], LEASE, 1 << 30)
        client.label([Labels(each.trajectory.id, 1.0, 1.0, "benchmark") for each in leases])
        count -= len(leases)
    client.close()


def fetch(endpoints: list[str], count: int, ready: Barrier, stored: Queue[Any]) -> None:
    """Fetch `count` trajectories as they are acknowledged, as a learner rank does."""
    clients = [ReplayClient(endpoint, "learner", "1") for endpoint in endpoints]
    ready.wait()
    while count:
        names = stored.get()
        count -= len(clients[shard_of(names[0], len(clients))].fetch(names))
    for client in clients:
        client.close()


def throughput(served: Replay, mode: str, count: int, tokens: int) -> dict[str, Any]:
    """Rates and processor time of one run; `mode` is lease or fetch."""
    shards = served.endpoints
    share = count // PRODUCERS
    ready = Spawn.Barrier(PRODUCERS + (len(shards) if mode == "lease" else 1) + 1)
    stored: Queue[Any] | None = Spawn.Queue() if mode == "fetch" else None
    producers = [
        Spawn.Process(target=produce, args=(shards[i % len(shards)], f"actor-{i}", share, tokens, ready, stored))
        for i in range(PRODUCERS)
    ]
    each = share * PRODUCERS // len(shards)
    consumers = (
        [Spawn.Process(target=score, args=(shard, f"scorer-{i}", each, ready)) for i, shard in enumerate(shards)]
        if mode == "lease"
        else [Spawn.Process(target=fetch, args=(shards, share * PRODUCERS, ready, stored))]
    )
    for process in (*producers, *consumers):
        process.start()
    before, children = served.cpu(), os.times()
    ready.wait()
    started = time.perf_counter()
    for process in producers:
        process.join()
    acknowledged = time.perf_counter() - started
    for process in consumers:
        process.join()
    seconds = time.perf_counter() - started
    if any(process.exitcode for process in (*producers, *consumers)):
        raise RuntimeError("a producer or consumer failed: its traceback is above")
    spent = os.times()
    others = spent.children_user + spent.children_system - children.children_user - children.children_system
    total = share * PRODUCERS
    return {
        "mode": mode,
        "shards": len(shards),
        "trajectories": total,
        "per_s": total / seconds,
        "acknowledged_per_s": total / acknowledged,
        "mb_per_s": total * len_bytes(tokens) / seconds / 1e6,
        "replay_cpu_us": (served.cpu() - before) / total * 1e6,
        "clients_cpu_us": others / total * 1e6,
        "load": load(),
    }


def len_bytes(tokens: int) -> int:
    """Bytes of one trajectory on the wire, its header left out: tokens and log-probs."""
    return 8 * tokens


def in_folder(root: Path, work: Callable[[Path], Any]) -> Any:
    """What `work` returns, in a folder that is removed afterwards."""
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
    parser.add_argument("--facts", type=int, default=100_000, help="trajectories that the restarted store knows")
    parser.add_argument("--only", nargs="+", default=["throughput", "limits", "tickets", "restart"])
    parser.add_argument("--ray", help="a Python that has Ray, for the plain alternative")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks"), help="on the disk that is measured")
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
                show("throughput", in_folder(options.dir, lambda f, s=shards, m=mode: through_replay(f, s, m, options)))
    if "tickets" in options.only:
        show("tickets", in_folder(options.dir, tickets.measure))
    if "restart" in options.only:
        show("restart", in_folder(options.dir, lambda folder: restart.measure(folder, options.facts)))
    if options.ray:
        command = [options.ray, str(Path(__file__).with_name("ray_deque.py")), str(options.tokens), str(options.count)]
        show("ray", json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
    else:
        print("ray: left out; name a Python that has it with --ray PYTHON")
    print(f"written to {write_result('replay', result)}")


if __name__ == "__main__":
    main()
