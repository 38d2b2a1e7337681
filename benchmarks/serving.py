"""Starts, awaits, measures and ends a real replay in its own processes, for benchmarks that send requests to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.data.writing import write_tasks
from asyncrl.machine.ports import free_ports
from asyncrl.replay.client.client import ReplayClient
from asyncrl.types import RunIdentity, Task

TICKS = os.sysconf("SC_CLK_TCK")
START_S = 60.0
TASKS = 1000


OWN_RUN = RunIdentity("run")
"""The name of the run in all benchmarks."""


def cpu_seconds(pid: int) -> float:
    """Processor seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def anonymous_mb(pid: int) -> float:
    """Anonymous resident memory of a process: without the pages of its memory-mapped store."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


@dataclass(frozen=True)
class Replay:
    """Running shards: their addresses and process ids."""

    endpoints: list[str]
    pids: list[int]

    def cpu(self) -> float:
        return sum(cpu_seconds(pid) for pid in self.pids)


@contextmanager
def replay(folder: Path, shards: int = 1, settings: Sequence[str] = ()) -> Iterator[Replay]:
    """Run `shards` replay processes with stores in `folder`, and end them at the end of the context."""
    data = folder / "tasks.parquet"
    if not data.exists():
        write_tasks(data, [_task(index) for index in range(TASKS)])
    port = free_ports(shards)
    command = [
        *(sys.executable, "-m", "asyncrl.replay", "model.path=none", f"data.train={data}"),
        *(f"run.dir={folder}", "run.name=run", f"network.replay_port={port}", f"replay.shards={shards}"),
        *(
            "replay.max_lag=1000000",
            "actor.max_tokens=1000000",
            "engine.max_length=1000000",
            "learner.batch_size=64",
            "learner.group_size=8",
            *settings,
        ),
    ]
    endpoints = [f"tcp://127.0.0.1:{port + shard}" for shard in range(shards)]
    with ExitStack() as stack:
        processes = []
        for shard in range(shards):
            log = stack.enter_context((folder / f"replay-{shard}.log").open("a"))
            process = subprocess.Popen([*command, f"replay.shard={shard}"], stderr=log)
            processes.append(process)
            stack.callback(_end, process)
        for endpoint in endpoints:
            wait_for(endpoint)
        yield Replay(endpoints, [process.pid for process in processes])


def wait_for(endpoint: str) -> None:
    """Return when the replay at `endpoint` answers."""
    client = ReplayClient(endpoint, "benchmark", "1", give_up_s=START_S)
    try:
        client.status()
    finally:
        client.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(START_S)


def _task(index: int) -> Task:
    question = {"role": "user", "content": f"What is {index} + 1?"}
    return Task(f"benchmark/train/{index}", [question], str(index + 1), "benchmark")
