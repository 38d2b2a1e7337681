"""Programs with pipes: what a cancelled start leaves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.machine.child import Guarded
from asyncrl.machine.program import start_program
from tests.helpers import async_until, living, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6])
async def test_a_cancelled_start_ends_although_a_child_of_the_program_holds_its_pipes(rounds: int, tmp_path: Path):
    pids = tmp_path / "pids"
    program = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(600)
"""
    with Guarded([sys.executable, "-c", program]) as guard:
        starting = asyncio.ensure_future(start_program(guard.command, 1 << 16, pass_fds=guard.files))
        for _ in range(rounds):
            await asyncio.sleep(0)
        # The event loop is busy until the program has a child.
        until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        started = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    await async_until(lambda: not living(started))


@pytest.mark.parametrize("rounds", [2, 3, 4])
async def test_a_program_ends_even_if_its_start_is_cancelled_twice(rounds: int):
    before = set(psutil.Process().children())
    starting = asyncio.ensure_future(start_program([sys.executable, "-c", "import time; time.sleep(600)"], 1 << 16))
    for _ in range(rounds):
        await asyncio.sleep(0)
    started = set(psutil.Process().children()) - before
    assert len(started) == 1
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await async_until(lambda: not living(started))
