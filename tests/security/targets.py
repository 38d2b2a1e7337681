"""Real processes that listen: a replay as a user starts it, and a weight publisher. Both are killed in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.data.writing import write_tasks
from asyncrl.machine.ports import free_ports
from asyncrl.replay.client import ReplayClient
from asyncrl.types import RunIdentity
from tests.helpers import GENEROUS_S, make_task, until

ROOT = Path(__file__).parents[2]
OWN_RUN = RunIdentity("train")
"""The run of every replay here, as far as its clients know."""


@dataclass
class Target:
    """A process that listens at `endpoint`; `log` is what it has written so far."""

    process: subprocess.Popen[str]
    endpoint: str
    output: Path

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def anonymous_mb(self) -> float:
        """Resident memory that is neither a file's nor shared."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (anonymous,) = (line for line in lines if line.startswith("RssAnon:"))
        return int(anonymous.split()[1]) / 1024

    def alive(self) -> bool:
        return self.process.poll() is None


@contextmanager
def started(command: list[str], endpoint: str, output: Path) -> Iterator[Target]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Target(process, endpoint, output)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def replay(folder: Path, *overrides: str) -> Iterator[Target]:
    """A replay that always has tickets, whose leases end soon."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / "tasks.parquet", (make_task(index) for index in range(8)))
    port = free_ports(1)
    settings = [
        *("model.path=none", f"data.train={folder / 'tasks.parquet'}", f"run.dir={folder}"),
        *(f"network.replay_port={port}", "replay.max_lag=1000000", "replay.durability=os"),
        *("replay.lease_s=2", "scoring.timeout_s=1", "learner.group_size=2", "learner.batch_size=4"),
        *("learner.minibatches=1", "replay.max_attempts=1000", *overrides),
    ]
    with started(["-m", "asyncrl.replay", *settings], f"tcp://127.0.0.1:{port}", folder / "replay.log") as target:
        until(lambda: "replay serves" in target.log or not target.alive())
        assert target.alive(), target.log
        yield target


@contextmanager
def publisher(folder: Path, keys: Path | None = None) -> Iterator[Target]:
    """A weight publisher that has published version 1 of `published.tensors()`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["-m", "tests.security.published", *([str(keys)] if keys else [])]
    with started(command, "", folder / "publisher.log") as target:
        assert target.process.stdout is not None
        target.endpoint = target.process.stdout.readline().strip()
        assert target.endpoint, target.log
        yield target


def publisher_refused(target: Target) -> int:
    """How many requests the publisher says it has refused."""
    assert target.process.stdin is not None
    assert target.process.stdout is not None
    target.process.stdin.write("refused\n")
    target.process.stdin.flush()
    return int(json.loads(target.process.stdout.readline()))


def asked(target: Target, what: str, **options: Any) -> dict[str, Any]:
    """The replay's `status` or `audit`."""
    client = ReplayClient(target.endpoint, "observer", "1", give_up_s=GENEROUS_S, **options)
    try:
        return dict(getattr(client, what)())
    finally:
        client.close()
