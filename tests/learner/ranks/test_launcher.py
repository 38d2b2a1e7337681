"""Ranks live and die together: with the process that started them, and with each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.data.writing import write_tasks
from asyncrl.errors import ConfigError, StoppedError, TooManyFailuresError
from asyncrl.learner.ranks.activity import RankState
from asyncrl.learner.ranks.launcher import OneHost, RanksError, Timeouts, run_ranks
from asyncrl.machine.activity import Activity
from tests.helpers import has_ended, make_task, until

pytestmark = pytest.mark.slow

RANK = """
import os, pathlib, signal, sys, time
from asyncrl.machine.activity import Activity
from asyncrl.learner.ranks.launcher import Membership
own, activity = Membership.of_this_process(), Activity()
own.start_heartbeat(activity)
{handler}
folder = pathlib.Path({folder!r})
(folder / f".{{own.rank}}").write_text(str(os.getpid()))
(folder / f".{{own.rank}}").rename(folder / str(own.rank))
{body}
"""
FOREVER = "while True: time.sleep(0.05)"
STOPS = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_STOPPED}))"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SHORT = Timeouts(poll=0.05, heartbeat=0.1, silence=4.0, others=1.0)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")


def ranks_of(folder: Path, body: str, handler: str = "") -> list[str]:
    return [sys.executable, "-c", RANK.format(folder=str(folder), body=body, handler=handler)]


def pids(folder: Path, count: int = 2) -> list[int]:
    """The process ids of all ranks, once they are there."""
    files = [folder / str(rank) for rank in range(count)]
    until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


@contextmanager
def once_running(folder: Path, action: Callable[[list[int]], None]) -> Iterator[None]:
    """Do `action` with the ranks' process ids as soon as they run, from a thread. All ranks have ended at the end."""
    found: list[int] = []

    def act() -> None:
        found.extend(pids(folder))
        action(found)

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()
    assert len(found) == 2
    assert all(has_ended(pid) for pid in found)


@pytest.mark.heavy
def test_ranks_that_all_end_well_are_done_also_after_a_long_wait(tmp_path: Path) -> None:
    run_ranks(ranks_of(tmp_path, "time.sleep(5)\nassert own.meeting.size == 2"), 2, threading.Event(), SHORT)
    assert len(set(pids(tmp_path))) == 2


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1 of 2 has not run for"),
        (signal.SIGTERM, "rank 1 of 2 was asked to stop, but no other rank was"),
    ],
)
def test_a_rank_that_gets_a_signal_ends_the_others_and_is_named(
    number: signal.Signals, reason: str, tmp_path: Path
) -> None:
    with once_running(tmp_path, lambda found: os.kill(found[1], number)), pytest.raises(RanksError, match=reason):
        run_ranks(ranks_of(tmp_path, FOREVER, STOPS), 2, threading.Event(), SHORT)


def test_a_rank_that_is_stopped_is_shown_as_silent_until_it_goes_on(tmp_path: Path) -> None:
    activity, stop = Activity(), threading.Event()

    def look(found: list[int]) -> None:
        os.kill(found[1], signal.SIGSTOP)
        until(lambda: activity.doing.silent == "rank 1 of 2")
        os.kill(found[1], signal.SIGCONT)
        until(lambda: activity.doing.silent == "")
        stop.set()

    with once_running(tmp_path, look), pytest.raises(StoppedError):
        run_ranks(ranks_of(tmp_path, FOREVER, STOPS), 2, stop, replace(SHORT, silence=60.0), activity=activity)


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        ("if own.rank == 0: sys.exit(7)", RanksError, "rank 0 of 2 ended with status 7"),
        ("import ctypes\nif own.rank == 1: ctypes.PyDLL(None).pause()", RanksError, "rank 1 of 2 has not run for"),
        ("if own.rank == 0: sys.exit(1)\ntime.sleep(0.6)\nsys.exit(2)", ConfigError, "rank 1 of 2 cannot run"),
        ("if own.rank == 0: sys.exit(1)\ntime.sleep(0.6)\nsys.exit(3)", TooManyFailuresError, "rank 1 of 2 has ended"),
    ],
    ids=["ends with a status", "hangs in native code", "cannot be configured, after another failed", "ends the run"],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(
    body: str, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    timeouts = SHORT if error is RanksError else replace(SHORT, others=200.0)
    with pytest.raises(error, match=reason):
        run_ranks(ranks_of(tmp_path, f"{body}\n{FOREVER}"), 2, threading.Event(), timeouts)


MEETS = """
import ctypes, os, time, torch
from asyncrl.learner.ranks.joining import joined
with joined() as ranks:
    ranks.activity.enter("train")
    {body}
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "ctypes.CDLL(None).pause() if ranks.rank else ranks.barrier()",
            "rank 1 works in phase train, at .* not advanced for 3 s .*; rank 0 waits for other ranks in phase train",
        ),
        (
            "ranks.stop_if(False) if ranks.rank else ranks.barrier()",
            "waits for other ranks in phase train, at torch/distributed/.* not advanced for 3 s .*; rank . waits for",
        ),
    ],
    ids=["in a call that does not return", "in different collectives"],
)
def test_a_rank_whose_main_thread_is_stuck_ends_all_with_its_name_and_phase(body: str, reason: str) -> None:
    timeouts = replace(SHORT, silence=60.0, stuck=3.0)
    with pytest.raises(RanksError, match=reason):
        run_ranks([sys.executable, "-c", MEETS.format(body=body)], 2, threading.Event(), timeouts)


class WaitsJudged(OneHost):
    """Judges two ranks only while rank 1 waits for the replay, and rank 0 for rank 1. Makes `file`, on which rank 1
    waits, once rank 0 has waited for twice the limit."""

    def __init__(self, file: Path, timeouts: Timeouts) -> None:
        super().__init__(2, timeouts)
        self._file, self._enough_s = file, 2 * timeouts.stuck

    def report(self, states: Sequence[RankState], stopping: bool) -> bool:
        if len(states) == 2 and states[0].in_collective and states[1].waits:
            super().report(states, stopping)
            if states[0].still_s >= self._enough_s:
                self._file.touch()
        return False


@pytest.mark.heavy
def test_ranks_may_wait_for_the_replay_and_each_other_for_longer_than_one_may_be_stuck(tmp_path: Path) -> None:
    file, short = tmp_path / "enough", replace(SHORT, silence=60.0, stuck=1.0)
    body = f"""
    deadline = time.monotonic() + 200.0
    def wait():
        while ranks.rank and not os.path.exists({str(file)!r}) and time.monotonic() < deadline:
            time.sleep(0.05)
    ranks.together(wait)
    ranks.barrier()
"""
    command = [sys.executable, "-c", MEETS.format(body=body)]
    run_ranks(command, 2, threading.Event(), short, WaitsJudged(file, short))
    assert file.exists()


def test_ranks_that_have_ended_their_work_may_exit_slowly(tmp_path: Path) -> None:
    body = "activity.enter('train')\nactivity.enter('end')\ntime.sleep(4)"
    run_ranks(ranks_of(tmp_path, body), 2, threading.Event(), replace(SHORT, stuck=2.0))


def test_a_stop_waits_for_a_rank_that_finishes_a_checkpoint(tmp_path: Path) -> None:
    body = f"""
if own.rank: time.sleep(1000)
with activity.finishing("the checkpoint step-000001"):
    while not (folder / "asked").exists(): time.sleep(0.01)
    time.sleep(4)
sys.exit({EXIT_STOPPED})
"""
    stop, activity = threading.Event(), Activity()

    def ask(_: list[int]) -> None:
        until(lambda: activity.unfinished == ["the checkpoint step-000001"])
        stop.set()
        (tmp_path / "asked").touch()

    handler = f"signal.signal(signal.SIGTERM, signal.SIG_IGN if own.rank == 0 else lambda *_: sys.exit({EXIT_STOPPED}))"
    with once_running(tmp_path, ask), pytest.raises(StoppedError):
        run_ranks(ranks_of(tmp_path, body, handler), 2, stop, replace(SHORT, stop=2.0), activity=activity)


@pytest.mark.parametrize(
    ("handler", "timeouts", "error"), [(STOPS, SHORT, StoppedError), (IGNORES, replace(SHORT, stop=1.0), RanksError)]
)
def test_a_stop_goes_to_every_rank_and_one_that_ignores_it_is_killed(
    handler: str, timeouts: Timeouts, error: type[Exception], tmp_path: Path
) -> None:
    stop = threading.Event()
    with once_running(tmp_path, lambda _: stop.set()), pytest.raises(error, match="stop"):
        run_ranks(ranks_of(tmp_path, FOREVER, handler), 2, stop, timeouts)


@linux
@pytest.mark.parametrize("state", ["running", "stopped"])
def test_ranks_die_with_the_process_that_started_them_and_the_next_launcher_removes_its_folder(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import threading
from asyncrl.learner.ranks.launcher import run_ranks
run_ranks({ranks_of(tmp_path, FOREVER)!r}, 2, threading.Event())
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        found = pids(tmp_path)
        if state == "stopped":
            for pid in found:
                os.kill(pid, signal.SIGSTOP)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    until(lambda: all(has_ended(pid) for pid in found))
    assert list(tmp_path.glob("asyncrl-ranks-*"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    OneHost(2, SHORT).finish("", final=False)
    assert not list(tmp_path.glob("asyncrl-ranks-*"))


def test_a_rank_ends_itself_once_nobody_reads_its_heartbeats(tmp_path: Path) -> None:
    read, write = os.pipe()
    code = f"""
import time
from asyncrl.machine.activity import Activity
from asyncrl.learner.ranks.launcher import Meeting, Membership
Membership(0, 0, Meeting(0, 1, ""), {write}, 0.1).start_heartbeat(Activity())
time.sleep(1000)
"""
    rank = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
    os.close(write)
    try:
        assert os.read(read, 1)
        os.close(read)
        until(lambda: rank.poll() is not None)
        assert rank.returncode == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()


def test_torchrun_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.parquet"
    write_tasks(tasks, [make_task()])
    command = [sys.executable, "-m", "asyncrl.learner", "model.path=none", f"data.train={tasks}", f"run.dir={tmp_path}"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cluster.learner_ranks" in done.stderr
