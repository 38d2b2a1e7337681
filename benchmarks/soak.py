"""Tests whether the replay's memory stays constant, and its store bounded, over a million trajectories.

The real `Server` with its service and store runs in this process, with requests passed to it directly. An actor takes
tickets and delivers small trajectories, a scorer labels them, and a learner takes plans, publishes and checkpoints, so
that everything is released (`retention: none`). Anonymous resident memory and the store's size are sampled. For each
trajectory the store keeps only about 120 bytes of records and plans, so that no id is accepted twice.

    python -m benchmarks.soak --trajectories 100000
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import zmq
from msgspec import structs

from asyncrl.machine import process
from asyncrl.replay.messages import OK, TICKETS, VALUES, Answer, decode_reply, encode_request
from asyncrl.replay.protocol import (
    Checkpointed,
    GetAudit,
    GetPlan,
    GetTickets,
    LeaseTrajectories,
    Published,
    PutLabels,
    PutTrajectory,
    ReplayRequest,
)
from asyncrl.replay.server import ReplayServer
from asyncrl.replay.service import ReplayService
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.store import Store
from asyncrl.types import Labels, Task, Ticket, Trajectory
from asyncrl.wire import Buffer, decode, encode, labels_message, read_trajectory, split, trajectory_message
from benchmarks.record import write_result
from benchmarks.serving import anonymous_mb, load
from benchmarks.wire import make_trajectory

BATCH, GROUP = 256, 8
TOKENS = 10
WHO = ("w", "1")


class Requests:
    """A replacement for the server's socket in this process: requests go in, replies come out."""

    def __init__(self) -> None:
        self._requests: deque[list[zmq.Frame]] = deque()
        self._replies: list[Answer] = []

    def ask(self, server: ReplayServer, requests: Sequence[tuple[ReplayRequest, Sequence[Buffer]]]) -> list[Answer]:
        """Send requests with their frames to the server in one turn, and return the replies. Raises RuntimeError: a
        request was refused."""
        self._replies.clear()
        for request, frames in requests:
            message = encode_request(request, 1, frames=frames)
            self._requests.append([zmq.Frame(b"client"), *map(zmq.Frame, message)])
        server.serve_once()
        refused = [reply.reason for reply in self._replies if reply.kind != OK]
        if refused or len(self._replies) < len(requests):
            raise RuntimeError(f"{len(self._replies)} of {len(requests)} answered, refused: {refused}")
        return list(self._replies)

    def recv_multipart(self, flags: int, copy: bool) -> list[zmq.Frame]:
        if not self._requests:
            raise zmq.Again
        return self._requests.popleft()

    def send_multipart(self, frames: list[Any], flags: int) -> None:
        self._replies.append(decode_reply([bytes(frame) for frame in frames[1:]]))


class Soak:
    """A replay in `folder` with its clients, which handle one batch at a time."""

    def __init__(self, folder: Path) -> None:
        tasks = [Task(f"task-{i}", [{"role": "user", "content": "?"}], "1", "soak") for i in range(100)]
        settings = ReplaySettings(
            admission=Admission(1, BATCH),
            feed=Feed(tasks, 0, True),
            held_out=(),
            group_size=GROUP,
            batch_size=BATCH,
            publish_every=1,
            max_attempts=3,
            temperature=1.0,
            high_water_bytes=1 << 40,
        )
        self._requests = Requests()
        self._store = Store(folder, 1 << 34, durable=False)
        socket = cast("zmq.Socket[bytes]", self._requests)
        self._server = ReplayServer(socket, self._store, ReplayService(settings, 30.0, time.monotonic))
        self._step = 0

    def round(self) -> int:
        """Run one learner step, from tickets to release, and return the number of its trajectories."""
        tickets = self._ask(GetTickets(*WHO, [], [], BATCH)).read(TICKETS)
        made = make_trajectory(TOKENS, version=self._step)
        self._requests.ask(self._server, [(PutTrajectory(0), _frames(made, ticket)) for ticket in tickets])
        leased = self._ask(LeaseTrajectories(*WHO, ["rules"], BATCH, 1 << 20, 1))
        names = [read_trajectory(decode(split(frame))).id for frame in leased.frames]
        labels = [encode(labels_message(Labels(name, 1.0, 1.0, "soak"))) for name in names]
        self._requests.ask(self._server, [(PutLabels(*WHO), frames) for frames in labels])
        self._ask(GetPlan(self._step, ahead=False))
        self._step += 1
        self._ask(Published(self._step))
        self._ask(Checkpointed(self._step, self._step))
        return len(names)

    def _ask(self, request: ReplayRequest) -> Answer:
        return self._requests.ask(self._server, [(request, ())])[0]

    def audit(self) -> dict[str, Any]:
        return self._ask(GetAudit()).read(VALUES)

    def close(self) -> None:
        self._store.close()


def _frames(made: Trajectory, ticket: Ticket) -> list[Buffer]:
    named = structs.replace(made, id=ticket.id, task_id=ticket.task.id, group_id=ticket.group_id, member=ticket.member)
    return encode(trajectory_message(named))


def samples(soak: Soak, folder: Path, count: int, every: int) -> Iterator[dict[str, Any]]:
    """Measure memory, store and rate after every `every` trajectories, up to `count`."""
    done, started, cpu = 0, time.perf_counter(), time.process_time()
    while done < count:
        target = min(count, done + every)
        before = done
        while done < target:
            done += soak.round()
        seconds, spent = time.perf_counter() - started, time.process_time() - cpu
        started, cpu = started + seconds, cpu + spent
        yield {
            "trajectories": done,
            "anonymous_mb": anonymous_mb(os.getpid()),
            "store_mb": (folder / "data.mdb").stat().st_blocks * 512 / 1e6,
            "per_s": (done - before) / seconds,
            "cpu_us": spent / (done - before) * 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=50_000, help="trajectories between two samples")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    process.keep_freed_memory()
    options.dir.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        soak = Soak(Path(name))
        for row in samples(soak, Path(name), options.trajectories, options.every):
            rows.append(row)
            print("  ".join(f"{key} {value:,.1f}" for key, value in row.items()), flush=True)
        audit = soak.audit()
        soak.close()
    growth = rows[-1]["anonymous_mb"] - rows[0]["anonymous_mb"]
    result = {"growth_mb": growth, "audit": audit, "load": load(), "rows": rows}
    print(f"memory grew by {growth:.1f} MB after the first sample; audit {audit}")
    print(f"written to {write_result('soak', result)}")


if __name__ == "__main__":
    main()
