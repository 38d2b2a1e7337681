"""Readers of the store of a replay at work: one that was killed costs no space, one that stays is named."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.replay.client.client import ReplayClient
from tests.helpers import make_labels, make_trajectory
from tests.replay.support import Core, ReplayThread, make_settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MAP_BYTES = 8 << 20
TOKENS = 20_000
STEPS = 40
"""Trajectories of all steps have three times as many bytes as the map."""


@contextmanager
def reading(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that reads the store inside one transaction, as long as it lives."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.replay.read_slowly", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train(client: ReplayClient, steps: range) -> None:
    """Deliver, label, plan and release; every trajectory is forgotten once its step is covered."""
    for step in steps:
        for ticket in client.tickets([], 4):
            client.put(make_trajectory(ticket, step, length=TOKENS))
        assert not any(
            client.label([make_labels(lease.trajectory.id) for lease in client.lease(["rules"], 100, 1 << 20)])
        )
        assert client.plan(step) is not None
        client.published(step + 1)
        client.checkpointed(step + 1, step + 1)


@pytest.mark.parametrize("clock", [time.monotonic, lambda: 0.0], ids=["looked at now and then", "never looked at"])
def test_a_reader_that_is_killed_inside_a_transaction_costs_no_space_and_writes_go_on(
    tmp_path: Path, clock: Callable[[], float]
) -> None:
    """The second clock never advances, so the write that finds no room is the first to look for dead readers."""
    settings = make_settings(high_water_bytes=MAP_BYTES // 2)
    with ReplayThread(tmp_path, settings, MAP_BYTES, clock) as replay:
        client = replay.client(give_up_s=60.0, retry_s=0.1)
        train(client, range(1))
        with reading(tmp_path) as reader:
            client.published(1)
            reader.kill()
            reader.wait()
            train(client, range(1, STEPS))
        status = client.status()
    assert status["trained"] == 4 * STEPS
    assert status["dead_readers"] == 1
    assert (tmp_path / "data.mdb").stat().st_size <= MAP_BYTES


def test_a_reader_that_stays_too_long_is_named_until_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = Core(tmp_path, make_settings())
    core.tickets(1)
    with reading(tmp_path) as reader:
        core.tickets(2)
        core.tick(0)
        core.tick(59)
        assert not lingering(core)
        core.tick(1)
        core.tick(3)
        (named,) = lingering(core)
        assert named["pid"] == reader.pid
        assert named["command"].endswith(f"-m tests.replay.read_slowly {tmp_path}")
        assert named["seconds"] == 63
        assert caplog.text.count(f"process {reader.pid} ({named['command']}) has read one snapshot") == 1
        reader.communicate()
    core.tick(1)
    assert not lingering(core)


def lingering(core: Core) -> list[dict[str, Any]]:
    readers: list[dict[str, Any]] = core.status()["readers"]
    return readers


def test_a_reader_that_begins_anew_now_and_then_is_not_named(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    for want in range(1, 5):
        with reading(tmp_path):
            core.tickets(want)
            core.tick(40)
    assert not lingering(core)
