"""Signs of life: what shows them, and when they are missed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.machine.activity import START_S, VARIABLE, Activity, Heartbeat, Pulse
from asyncrl.machine.doing import Doing, read_doing
from tests.helpers import has_ended, until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def is_renewed(path: Path, heartbeat: Heartbeat) -> bool:
    os.utime(path, (1, 1))
    heartbeat.beat()
    return path.stat().st_mtime > 1


def test_a_process_shows_life_while_its_main_thread_advances_or_waits(tmp_path: Path) -> None:
    path, activity, clock = tmp_path / "beats", Activity(), Clock()
    path.touch()
    shown: list[float] = []
    heartbeat = Heartbeat(path, activity, 20.0, 30.0, lambda: shown.append(clock.now), clock)
    for _ in range(3):
        clock.now += 1000.0
        assert is_renewed(path, heartbeat), "it has not begun"
    activity.enter("work")
    assert is_renewed(path, heartbeat)
    clock.now += 9.0
    assert is_renewed(path, heartbeat), "it may stand still for a while"
    clock.now += 2.0
    assert not is_renewed(path, heartbeat)
    assert not shown
    for _ in range(3):
        clock.now += 8.0
        heartbeat.beat()
    assert shown == [clock.now - 8.0], "once, before it counts as hung"
    with activity.waiting():
        clock.now += 1000.0
        assert is_renewed(path, heartbeat)
    assert is_renewed(path, heartbeat)


def test_a_lost_heartbeat_is_noticed_by_the_time_in_which_somebody_looked(tmp_path: Path) -> None:
    path, clock = tmp_path / "alive" / "actor-0", Clock()
    pulse, activity = Pulse(path, clock), Activity()

    def looked_at(seconds: int) -> bool:
        for _ in range(seconds):
            clock.now += 1.0
            if pulse.is_lost(5.0):
                return True
        return False

    assert not looked_at(int(START_S) - 1), "libraries are loaded"
    heartbeat = Heartbeat(path, activity, 20.0)

    def beat() -> None:
        heartbeat.beat()
        os.utime(path, (clock.now, clock.now))  # Two beats within a tick of the kernel have the same time.

    with activity.finishing("the checkpoint step-000004"):
        beat()
        assert pulse.unfinished == "the checkpoint step-000004"
    assert not looked_at(4)
    beat()
    assert pulse.unfinished == ""
    assert not looked_at(1)
    clock.now += 1000.0
    assert not looked_at(2), "whoever looks did not run either"
    assert looked_at(2)


def test_what_a_process_must_finish_is_never_empty_while_it_changes_nor_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, activity, seen = tmp_path / "learner", Activity(), list[str]()
    pulse, heartbeat = Pulse(path), Heartbeat(path, activity, 20.0)
    write = os.pwrite
    with activity.finishing("a checkpoint of the steps that are done"):
        heartbeat.beat()

        def full(file: int, text: bytes, start: int) -> int:
            seen.append(pulse.unfinished)
            if len(seen) == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, text, start)

        monkeypatch.setattr(os, "pwrite", full)
        with activity.finishing("the checkpoint step-000004"):
            for _ in range(2):
                heartbeat.beat()
                seen.append(pulse.unfinished)
    one, both = "a checkpoint of the steps that are done", ", the checkpoint step-000004"
    assert seen == [one, one, one, one + both]


@pytest.mark.slow
def test_a_process_that_stands_still_is_silent_and_says_where_it_is(tmp_path: Path) -> None:
    code = """
import threading
from asyncrl.machine.activity import Activity, heartbeat
activity = Activity()
with heartbeat(activity, 4.0):
    activity.enter("work")
    threading.Event().wait()
"""
    path, output = tmp_path / "beats", tmp_path / "log"
    pulse = Pulse(path)
    with output.open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, VARIABLE: str(path)}, stderr=log)
    try:
        until(lambda: time.sleep(0.1) or pulse.is_lost(2.0))
        until(lambda: 'File "<string>", line 7' in output.read_text())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


HANGS = """
import os, pathlib, signal, sys, time
from asyncrl.machine.activity import Activity, heartbeat
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with heartbeat(Activity(), 600.0, stop_s=1.0):
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(600)
"""
STARTS = """
import pathlib, sys, time
from asyncrl.machine.activity import VARIABLE
from asyncrl.machine.child import start_child
folder = pathlib.Path(sys.argv[1])
start_child([sys.executable, "-c", sys.argv[2], str(folder / "pid")], folder / "log", {VARIABLE: str(folder / "beats")})
time.sleep(600)
"""


@pytest.mark.slow
def test_a_process_that_hangs_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path), HANGS]) as starter:
        pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        starter.kill()
    until(lambda: has_ended(pid))
    assert "this one has not stopped; it is killed" in (tmp_path / "log").read_text()


def test_a_process_on_a_full_disk_shows_life_and_says_what_it_does_in_the_room_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, activity = tmp_path / "replay", Activity()
    pulse, heartbeat = Pulse(path), Heartbeat(path, activity, 20.0)
    heartbeat.beat()
    os.utime(path, (0, 0))

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    activity.enter("serve")
    heartbeat.beat()
    assert read_doing(path) == activity.doing
    assert path.stat().st_mtime > 0

    def without_room(file: int, content: bytes, start: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", without_room)
    os.utime(path, (0, 0))
    activity.enter("train")
    with activity.finishing("a checkpoint"):
        heartbeat.beat()
    assert path.stat().st_mtime > 0, "it is alive, although it can write nothing"
    assert not pulse.is_lost(20.0)


def test_a_process_says_what_it_does_and_nothing_of_an_earlier_one_is_left(tmp_path: Path) -> None:
    path, clock = tmp_path / "alive" / "learner", Clock()
    Pulse(path, clock)
    activity = Activity(clock)
    heartbeat = Heartbeat(path, activity, 20.0, clock=clock)
    heartbeat.beat()
    assert read_doing(path) == Doing("start", 100.0)
    clock.now, activity.work = 131.0, "loading the model: 12 of 30 GB, 20 s left"
    activity.enter("train")
    heartbeat.beat()
    assert read_doing(path) == Doing("train", 131.0, activity.work)
    Pulse(path, clock)
    assert read_doing(path) is None
