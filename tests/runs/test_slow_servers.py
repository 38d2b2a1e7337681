"""A slow server, from its log and its processes to the words of `asyncrl status` and the page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.dashboard.overview import Overviews
from asyncrl.dashboard.stores import ReplayStores
from asyncrl.engine.sglang.load import LoadWatch, ServerLoad, load_counters
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay.store.store import Store
from asyncrl.runs.inspect.__main__ import main
from asyncrl.runs.run import Run
from tests.runs.support import write_run

STEPS, BURNT_S = 6, 0.2
SCHEDULER = f"""
import itertools, sys, time
open('/proc/self/comm', 'w').write('sglang::scheduler_TP0')
for _ in itertools.chain([''], sys.stdin):
    until = time.process_time() + {BURNT_S}
    while time.process_time() < until:
        pass
    print('burnt', flush=True)
"""
"""A scheduler's process. At its start and for each line of input it uses {BURNT_S} seconds of its core."""
SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SCHEDULER!r}])"
SLOW = (
    "[2026-11-29 04:52:24] Decode batch, #running-req: 512, #token: 62431, token usage: 0.09, cuda graph: False, "
    "gen throughput (token/s): 12360.41, #queue-req: 40\n"
)


@contextmanager
def fake_server() -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield server
    finally:
        server.kill()
        # The scheduler's input ends with the server's pipe.
        server.communicate()


def look(log: Path) -> ServerLoad:
    """The load of a fake server that logs SLOW, by a clock that counts the processor time of its scheduler."""
    clock = iter([0.0, 0.0, BURNT_S])
    with fake_server() as server:
        assert server.stdin is not None
        assert server.stdout is not None
        watch = LoadWatch(log, lambda: server.pid, lambda: next(clock))
        assert server.stdout.readline() == b"burnt\n"
        watch.look()
        log.write_text(SLOW)
        server.stdin.write(b"\n")
        server.stdin.flush()
        assert server.stdout.readline() == b"burnt\n"
        return watch.look()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose learner waits for a server that decodes without graphs, queues, and whose scheduler is at its
    limit."""
    folder = write_run(tmp_path / "mine", [0.5] * STEPS, {"engine.kind": "sglang"})
    Store(folder / "replay", 1 << 24, durable=False).close()
    counters = load_counters([look(tmp_path / "server.log")])
    metrics_file(folder, "actor-0").unlink()
    actor = JsonLines(metrics_file(folder, "actor-0"), lambda: 100.0 + 2 * STEPS)
    actor.log(STEPS, {"idle": 0.0, **counters})
    return Run(folder)


@pytest.mark.slow
def test_status_and_page_say_what_slows_a_server_down_and_how_to_mend_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status", "--run", str(run.folder)])
    status = " ".join(capsys.readouterr().out.split())
    page = Overviews(ReplayStores()).of(run)["advice"]
    for found, mend in (
        ("1.0 servers decoded without CUDA graphs", "remove arguments about graphs from engine.server.arguments"),
        ("40 requests waited in servers", "lower actor.concurrency from"),
        ("the scheduler of a server took", "set engine.server.per_gpu=2"),
    ):
        assert found in status
        assert mend in status
        assert any(found in each and mend in each for each in page)
