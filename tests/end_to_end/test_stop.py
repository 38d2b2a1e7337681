"""A run with servers of its own that is stopped in its midst: everything ends in time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.config.exits import EXIT_STOPPED
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, Run
from tests.helpers import GENEROUS_S

pytestmark = [pytest.mark.slow, pytest.mark.long]


def is_server(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # Others may end meanwhile.
        return "sglang.launch_server" in process.cmdline()
    return False


def test_a_run_whose_servers_drain_for_ever_ends_within_its_limits_and_leaves_no_process(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    fake = Path(__file__).parent / "fake_server"
    words = [
        *(each for each in World.make(tmp_path).overrides(1) if not each.startswith(("engine.", "cluster."))),
        *("engine.kind=sglang", f"engine.python={sys.executable}", "engine.server.arguments=['--device=cpu']"),
        *(f"engine.server.environment={{PYTHONPATH: '{fake}:{ROOT}'}}", "engine.server.count=2"),
        *("weights.canary=false", "replay.filter.zero_variance=false", "learner.steps=1000"),
    ]
    run = start("train", *words)
    run.wait_for_step(1)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    assert sum(map(is_server, processes)) >= 2
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(GENEROUS_S) == EXIT_STOPPED
    _, alive = psutil.wait_procs(processes, GENEROUS_S)
    assert not alive
    assert "did not stop in time" not in run.output
    assert "result             stopped" in run.output
