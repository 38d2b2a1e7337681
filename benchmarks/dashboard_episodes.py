"""Measures how fast the page shows 10^5 kept episodes.

A run of 4,200 steps, each with 3 groups of 8 episodes in the index of kept episodes. `first_table_s` is the time of the
first request to a new server. Every other figure is the median of five requests. All are wall-clock times of HTTP
requests on this machine.

    python -m benchmarks.dashboard_episodes
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode, urlsplit

from asyncrl.config.locations import CONFIG_FILE
from asyncrl.observe.kept.episode import KeptRow
from asyncrl.observe.kept.format import FOLDER
from asyncrl.observe.kept.index import INDEX, IndexLine, encode_index
from benchmarks.record import write_result

STEPS, GROUPS, SIZE = 4200, 3, 8
SORTED = ("-reward", "reward", "-tokens", "lag", "id")
QUERIES: Mapping[str, Sequence[Mapping[str, str]]] = {
    "again": [{}] * 5,
    "filter": [{"reward": f"0.{tenth}..", "finish": "truncated"} for tenth in range(5)],
    "sort": [{"sort": name} for name in SORTED],
    "text": [{"text": f"00{number}"} for number in range(5)],
}


def write_run(folder: Path) -> None:
    """Write a run's folder that has only the index of its kept episodes."""
    (folder / FOLDER).mkdir(parents=True)
    (folder / CONFIG_FILE).write_text("model: {path: none}\n")
    lines = (
        IndexLine(step, 1, [_row(step, group, member) for group in range(GROUPS) for member in range(SIZE)])
        for step in range(STEPS)
    )
    (folder / FOLDER / INDEX).write_bytes(encode_index("benchmark", lines))


def _row(step: int, group: int, member: int) -> KeptRow:
    name = f"t{step * GROUPS + group:09d}"
    return KeptRow(
        step=step,
        id=f"{name}.{member}.0",
        group_id=name,
        member=member,
        task_id=f"examples/train/{group}",
        source="examples",
        reward=(step * 7 + member * 3) % 11 / 10,
        outcome=1.0,
        sampled=100 + member,
        tokens=200 + step % 50,
        turns=2,
        branches=1,
        tools=("calculator",),
        tool_calls=1,
        finish="truncated" if member == 7 else "completed",
        lag=step % 3,
        version=step,
        flags=("random",),
    )


@contextmanager
def served(folder: Path) -> Iterator[tuple[HTTPConnection, str]]:
    """A connection to the page's server, and the cookie for it."""
    command = [sys.executable, "-m", "asyncrl", "dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = urlsplit(line[line.index("http://") :].strip())
        try:
            connection = HTTPConnection(address.hostname or "", address.port)
            connection.request("GET", f"/?{address.query}")
            answer = connection.getresponse()
            answer.read()
            yield connection, (answer.getheader("Set-Cookie") or "").partition(";")[0]
        finally:
            server.send_signal(signal.SIGINT)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run)
        with served(run) as (connection, cookie):

            def seconds(query: Mapping[str, str]) -> float:
                started = time.perf_counter()
                connection.request("GET", f"/api/runs/run/episodes?{urlencode(query)}", headers={"Cookie": cookie})
                answer = connection.getresponse()
                body = answer.read()
                assert answer.status == 200, body
                return time.perf_counter() - started

            result: dict[str, Any] = {"episodes": STEPS * GROUPS * SIZE, "first_table_s": seconds({})}
            for name, queries in QUERIES.items():
                result[f"{name}_ms"] = 1e3 * median(map(seconds, queries))
    path = write_result("dashboard_episodes", result)
    sys.stdout.write(f"{path}: {result}\n")


if __name__ == "__main__":
    main()
