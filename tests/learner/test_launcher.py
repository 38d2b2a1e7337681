"""Ranks live and die together: with the process that started them, and with each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.config.load import EXIT_STOPPED
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.learner.launcher import Patience, RanksError, run_ranks
from tests.helpers import until

RANK = """
import os, pathlib, signal, sys, time
from asyncrl.learner.launcher import Membership
own = Membership.of_this_process()
own.beat()
folder = pathlib.Path({folder!r})
def show():
    (folder / f".{{own.rank}}").write_text(str(os.getpid()))
    (folder / f".{{own.rank}}").rename(folder / str(own.rank))
{body}
"""
FOREVER = "show()\nwhile True: time.sleep(0.05)"
HURRIED = Patience(silence=15.0, last_words=1.0)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")


def ranks_of(folder: Path, body: str) -> list[str]:
    return [sys.executable, "-c", RANK.format(folder=str(folder), body=body)]


def pids(folder: Path, count: int = 2) -> list[int]:
    """The process ids of all ranks, once they are there."""
    files = [folder / str(rank) for rank in range(count)]
    until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@contextmanager
def once_running(folder: Path, action: object) -> Iterator[list[int]]:
    """Do `action` with the ranks' process ids as soon as they run, from a thread of its own."""
    found: list[int] = []

    def act() -> None:
        found.extend(pids(folder))
        action(found)  # type: ignore[operator]

    thread = threading.Thread(target=act)
    thread.start()
    yield found
    thread.join()


def failure_of(folder: Path, body: str) -> str:
    """Why two ranks were ended."""
    with pytest.raises(RanksError) as failure:
        run_ranks(ranks_of(folder, body), 2, threading.Event(), HURRIED)
    return str(failure.value)


def test_ranks_that_all_end_well_are_done(tmp_path: Path) -> None:
    run_ranks(ranks_of(tmp_path, "show(); assert own.size == 2"), 2, threading.Event(), HURRIED)
    assert len(set(pids(tmp_path))) == 2


def test_a_rank_that_is_killed_takes_the_others_with_it_and_is_named(tmp_path: Path) -> None:
    with once_running(tmp_path, lambda found: os.kill(found[1], signal.SIGKILL)) as found:
        failure = failure_of(tmp_path, FOREVER)
    assert "rank 1 of 2 was killed by SIGKILL" in failure
    assert all(gone(pid) for pid in found)


def test_a_rank_that_fails_takes_the_others_with_it_and_is_named(tmp_path: Path) -> None:
    body = f"if own.rank == 0: sys.exit(7)\n{FOREVER}"
    with pytest.raises(RanksError, match="rank 0 of 2 ended with status 7"):
        run_ranks(ranks_of(tmp_path, body), 2, threading.Event(), HURRIED)


def test_a_rank_that_cannot_be_configured_is_the_reason_although_another_failed_first(tmp_path: Path) -> None:
    body = "if own.rank == 0: sys.exit(1)\ntime.sleep(0.6)\nsys.exit(2)"
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        run_ranks(ranks_of(tmp_path, body), 2, threading.Event(), Patience(last_words=200.0))


def test_a_stopped_rank_takes_the_others_with_it_and_is_named(tmp_path: Path) -> None:
    with once_running(tmp_path, lambda found: os.kill(found[0], signal.SIGSTOP)) as found:
        failure = failure_of(tmp_path, FOREVER)
    assert "rank 0 of 2 has not run for" in failure
    assert all(gone(pid) for pid in found)


def test_a_rank_that_hangs_in_native_code_takes_the_others_with_it(tmp_path: Path) -> None:
    hang = f"show()\nimport ctypes\nif own.rank == 1: ctypes.PyDLL(None).pause()\n{FOREVER}"
    with pytest.raises(RanksError, match="rank 1 of 2 has not run for"):
        run_ranks(ranks_of(tmp_path, hang), 2, threading.Event(), HURRIED)


def test_a_rank_that_waits_for_long_does_not_hang(tmp_path: Path) -> None:
    waits = "show(); time.sleep(6)"
    run_ranks(ranks_of(tmp_path, waits), 2, threading.Event(), Patience(silence=5.0))


STOPS = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_STOPPED}))\n{FOREVER}"


def test_a_stop_goes_to_every_rank_and_is_no_failure(tmp_path: Path) -> None:
    stop = threading.Event()
    with once_running(tmp_path, lambda _: stop.set()) as found, pytest.raises(StoppedError):
        run_ranks(ranks_of(tmp_path, STOPS), 2, stop, HURRIED)
    assert all(gone(pid) for pid in found)


def test_a_rank_that_a_stranger_asks_to_stop_does_not_end_the_training_as_if_it_were_done(tmp_path: Path) -> None:
    with once_running(tmp_path, lambda found: os.kill(found[1], signal.SIGTERM)) as found:
        assert "rank 1 of 2 was asked to stop, alone" in failure_of(tmp_path, STOPS)
    assert all(gone(pid) for pid in found)


def test_a_rank_that_ignores_a_stop_is_killed(tmp_path: Path) -> None:
    stop = threading.Event()
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}"
    with once_running(tmp_path, lambda _: stop.set()) as found, pytest.raises(RanksError, match="did not stop"):
        run_ranks(ranks_of(tmp_path, body), 2, stop, Patience(stop=1.0))
    assert all(gone(pid) for pid in found)


def launched(folder: Path, body: str) -> subprocess.Popen[bytes]:
    """A process of its own that starts two ranks, as the learner does."""
    code = f"""
import threading
from asyncrl.learner.launcher import run_ranks
run_ranks({ranks_of(folder, body)!r}, 2, threading.Event())
"""
    return subprocess.Popen([sys.executable, "-c", code])


@linux
@pytest.mark.parametrize("state", ["running", "stopped"])
def test_ranks_die_with_the_process_that_started_them_whatever_they_do(state: str, tmp_path: Path) -> None:
    launcher = launched(tmp_path, FOREVER)
    try:
        found = pids(tmp_path)
        if state == "stopped":
            for pid in found:
                os.kill(pid, signal.SIGSTOP)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    until(lambda: all(gone(pid) for pid in found))


def test_a_rank_ends_itself_where_nobody_watches_any_more(tmp_path: Path) -> None:
    read, write = os.pipe()
    code = f"""
import time
from asyncrl.learner.launcher import Membership
Membership(0, 1, "", {write}).beat()
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
