"""The load of a server, from the lines of its log and the processor time of its scheduler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.engine.sglang import load
from asyncrl.engine.sglang.load import LoadWatch, ServerLoad, load_counters

PREFILL = (
    "[2026-11-29 04:52:12] Prefill batch, #new-seq: 28, #new-token: 8192, #cached-token: 0, token usage: 0.02, "
    "#running-req: 1, #queue-req: 364, #pending-token: 94108, cuda graph: True, input throughput (token/s): 208734.64\n"
)
DECODE = (
    "[2026-11-29 04:52:24] Decode batch, #running-req: 190, #token: 62431, token usage: 0.09, cuda graph: {}, "
    "gen throughput (token/s): 12360.41, #queue-req: {}\n"
)


def watch(log: Path, pid: int | None = None, times: Sequence[float] = ()) -> LoadWatch:
    clock = iter(times)
    return LoadWatch(log, lambda: pid, lambda: next(clock, 0.0))


def test_the_newest_batch_of_decoding_counts(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(DECODE.format("True", 3) + DECODE.format("False", 12) + PREFILL)
    assert watch(log).look() == ServerLoad(False, 12)


def test_only_lines_since_the_last_look_are_read(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    seen = watch(log)
    assert seen.look() == ServerLoad(), "there is no log yet"
    log.write_text(DECODE.format("False", 12))
    assert seen.look() == ServerLoad(False, 12)
    assert seen.look() == ServerLoad(False, 0), "the newest batch is still the same"
    with log.open("a") as file:
        file.write(DECODE.format("True", 0))
    assert seen.look() == ServerLoad(True, 0)
    log.write_text(DECODE.format("False", 1))
    assert seen.look() == ServerLoad(False, 1), "the server was started again with a new log"


def test_of_a_log_that_grew_fast_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NEWEST_BYTES", 200)
    log = tmp_path / "server.log"
    log.write_text(DECODE.format("False", 9) * 100 + DECODE.format("True", 1))
    assert watch(log).look() == ServerLoad(True, 1)


def test_the_scheduler_is_found_by_its_name_among_the_servers_processes(tmp_path: Path) -> None:
    named = "open('/proc/self/comm', 'w').write('sglang::schedul'); print('named', flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {named!r}])"
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"named\n"
        seen = watch(tmp_path / "none.log", server.pid, [0.0, 1.0, 2.0])
        assert seen.look().scheduler is None, "there is nothing to compare with"
        busy = seen.look().scheduler
        assert busy is not None
        assert 0.0 <= busy < 1.0, "it waits for input"
    finally:
        server.communicate(b"\n")
    assert seen.look().scheduler is None, "it has ended"


def test_a_server_without_a_process_has_no_scheduler(tmp_path: Path) -> None:
    assert watch(tmp_path / "none.log", None).look() == ServerLoad()


def test_the_gauges_are_those_of_all_servers_of_the_actor() -> None:
    loads = [ServerLoad(False, 5, 0.5), ServerLoad(True, 2, 0.9), ServerLoad()]
    assert load_counters(loads) == {"servers_without_graphs": 1, "servers_queued": 7, "scheduler_busy": 0.9}
    assert load_counters([ServerLoad()]) == {"servers_without_graphs": 0, "servers_queued": 0}
