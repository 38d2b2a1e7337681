"""The status and the page say that a role waits for room on a full disk, as long as it does."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from asyncrl.config.locations import ALIVE_FOLDER
from asyncrl.dashboard.overview import Overviews
from asyncrl.dashboard.stores import ReplayStores
from asyncrl.machine.doing import Doing, forget_doing
from asyncrl.machine.owner import OWNER_FILE
from asyncrl.runs.inspect.table import stall_lines
from asyncrl.runs.run import Run
from asyncrl.runs.state.watch import StallReader, Stalls
from tests.runs.support import write_run

AT = datetime(2026, 11, 28, 20, 57, 58)
FULL = "the disk is full: checkpoints/step-000006 waits for room (no space)"
WAITS = "learner waits for room on the disk to write checkpoints/step-000006"


@contextmanager
def running(folder: Path, now: float) -> Iterator[None]:
    """The learner of the run writes a checkpoint, in the eyes of its views."""
    (folder / "processes.json").write_text(json.dumps({"learner": {"pid": 7, "host": "node", "restarts": 0}}))
    beats = folder / ALIVE_FOLDER / "learner"
    beats.parent.mkdir(exist_ok=True)
    beats.touch()
    os.utime(beats, (now, now))
    Doing("checkpoint", now).write(beats)
    with (folder / OWNER_FILE).open("w") as lock:
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, lock)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_log(folder: Path, at: datetime, text: str) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / "learner.log").open("a") as log:
        log.write(f"{at:%Y-%m-%d %H:%M:%S},928 {text}\n")


def shown(stalls: Stalls) -> list[str]:
    return [line.plain for line in stall_lines(stalls.values())]


@pytest.mark.slow
def test_the_status_says_that_a_role_waits_for_room_on_the_disk_and_not_that_all_is_well(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", [0.1] * 30))
    now = [AT.timestamp() + 3600]
    reader = StallReader(run, lambda: now[0])
    with running(run.folder, now[0]):
        before = reader.read(None, run.settings())
        assert (before.waits, before.errors) == ([], [])
        assert before.advice is not None
        write_log(run.folder, AT, f"ERROR asyncrl.machine.files: {FULL}")
        assert shown(reader.read(None, run.settings())) == [
            f"error   learner: {FULL}, 60 min ago",
            f"waits   {WAITS} for 60 min",
        ]
        write_log(
            run.folder, AT, "WARNING asyncrl.machine.files: checkpoints/step-000006 is written: there is room again"
        )
        assert reader.read(None, run.settings()) == before


@pytest.mark.slow
@pytest.mark.parametrize(("free", "is_told"), [(40 << 10, True), (1 << 30, False)])
def test_a_full_disk_on_which_no_role_can_write_why_it_waits_is_told(tmp_path: Path, free: int, is_told: bool) -> None:
    run = Run(write_run(tmp_path / "run", [0.1] * 4))
    with running(run.folder, datetime.now().timestamp()):
        forget_doing(run.folder / ALIVE_FOLDER / "learner")
        text = StallReader(run, free=lambda folder: free).read(None, run.settings()).text
    told = f": the disk of {run.folder} is full, 40960 bytes are left (make room, and the run goes on)"
    assert text == f"learner has been starting{told if is_told else ''}"


@pytest.mark.slow
def test_the_page_warns_of_the_newest_errors_of_roles(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", [0.1] * 4))
    with running(run.folder, datetime.now().timestamp()):
        write_log(run.folder, datetime.now(), f"ERROR asyncrl.machine.files: {FULL}")
        found = Overviews(ReplayStores()).of(run)
    assert found["warnings"][0].startswith(f"error of learner: {FULL}, ")
    assert found["warnings"][0].endswith(" ago")
    assert found["waits_text"].startswith(WAITS)
    assert found["advice"] is None
