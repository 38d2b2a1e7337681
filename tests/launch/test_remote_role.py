"""The process that keeps a role on another host: the role ends when the launcher says so, or is silent for too long."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.launch.hosts.remote_role import ALIVE, DRAIN, KILL, STARTED, STOP, UNWANTED, KeptRole, start_alone
from tests.helpers import GENEROUS_S, has_ended, until, whole_lines

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("ready", flush=True)
while True: time.sleep(0.05)
"""
OBEDIENT = "import time; print('ready', flush=True); time.sleep(600)"


REMOTE = [sys.executable, "-m", "asyncrl.launch.hosts.remote_role"]


@contextmanager
def kept(
    log: Path, code: str, lease_s: float = GENEROUS_S, launcher: str = "one", number: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """A role with this code, once it has printed a line."""
    with starting(log, code, lease_s, launcher, number) as process:
        until(lambda: whole_lines(log))
        yield process


@contextmanager
def starting(
    log: Path, code: str, lease_s: float, launcher: str = "one", number: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """A role with this code, which may not run yet."""
    beats = log.parent / "alive" / "actor-0"
    command = [*REMOTE, "keep", launcher, str(number), *map(str, (beats, log, lease_s)), sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def signs_of_life(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The launcher sends one ten times a second meanwhile."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.1):
            tell(process, ALIVE)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def tell(process: subprocess.Popen[bytes], what: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(what)


def pid_of_role(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(next(line for line in process.stdout if line.startswith(STARTED)).removeprefix(STARTED).split()[0])


@pytest.mark.slow
def test_a_role_tells_its_process_id_writes_its_log_and_its_status_is_handed_on(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    log.write_text("")
    with kept(log, "import os, sys; print(os.getpid()); sys.exit(3)") as process:
        assert process.wait(GENEROUS_S) == 3
        assert pid_of_role(process) == int(log.read_text())
    with kept(log, "import os, signal; print('ends'); os.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait(GENEROUS_S) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_role_is_asked_to_stop_and_killed_if_the_launcher_says_so(tmp_path: Path) -> None:
    with kept(tmp_path / "obedient", OBEDIENT) as process:
        tell(process, ALIVE)
        tell(process, STOP)
        assert process.wait(GENEROUS_S) == 128 + signal.SIGTERM
    log = tmp_path / "stubborn"
    with kept(log, STUBBORN) as process:
        tell(process, STOP)
        until(lambda: "asked" in log.read_text())
        assert process.poll() is None
        tell(process, KILL)
        assert process.wait(GENEROUS_S) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_role_is_asked_to_drain_if_the_launcher_says_so(tmp_path: Path) -> None:
    with kept(tmp_path / "role", OBEDIENT) as process:
        tell(process, DRAIN)
        assert process.wait(GENEROUS_S) == 128 + signal.SIGUSR2


@pytest.mark.slow
@pytest.mark.heavy
def test_a_role_whose_launcher_is_silent_or_gone_ends_with_its_lease(tmp_path: Path) -> None:
    with starting(tmp_path / "silent", OBEDIENT, lease_s=0.3) as process:
        pid = pid_of_role(process)
        assert process.wait(GENEROUS_S) == 128 + signal.SIGKILL
        assert has_ended(pid)
    log, lease_s = tmp_path / "gone", 4.0
    with starting(log, STUBBORN, lease_s) as process:
        pid = pid_of_role(process)
        with signs_of_life(process):
            begun = time.monotonic()
            until(lambda: log.read_text() and time.monotonic() > begun + 1.25 * lease_s)
            assert not has_ended(pid), "each sign of life renews the lease"
        assert process.stdin is not None
        process.stdin.close()
        until(lambda: "asked" in log.read_text())
        assert process.wait(GENEROUS_S) == 128 + signal.SIGKILL
        assert log.read_text().count("asked") == 1
        assert has_ended(pid)


@pytest.mark.slow
def test_a_role_that_is_started_again_before_anybody_heard_of_its_first_start_runs_once(tmp_path: Path) -> None:
    """The connection to the first start is lost, and it does not know. The second one takes the role over, and an
    earlier one that comes late starts nothing."""
    first, second, late = (tmp_path / name for name in ("first", "second", "late"))
    with kept(first, OBEDIENT) as lost, kept(second, OBEDIENT, number=3) as process:
        assert has_ended(pid_of_role(lost)), "the first one has ended when the second one runs"
        assert lost.wait(GENEROUS_S) == 128 + signal.SIGTERM
        beats = str(tmp_path / "alive" / "actor-0")
        command = [*REMOTE, "keep", "one", "2", beats, str(late), "60", sys.executable, "-c", OBEDIENT]
        assert subprocess.run(command, stdin=subprocess.PIPE, timeout=GENEROUS_S).returncode == UNWANTED
        assert not late.exists()
        assert process.poll() is None


def test_a_start_that_arrives_after_its_launcher_has_gone_starts_nothing(tmp_path: Path) -> None:
    beats, log = str(tmp_path / "alive" / "actor-0"), tmp_path / "log"
    command = [*REMOTE, "keep", "one", "1", beats, str(log), "60", sys.executable, "-c", OBEDIENT]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=GENEROUS_S).returncode == UNWANTED
    assert not log.exists()


def test_a_role_whose_start_cannot_be_noted_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, log = tmp_path / "alive" / "actor-0", tmp_path / "log"
    beats.parent.mkdir()
    started = []

    def full(file: int, text: bytes, start: int) -> int:
        started.append(until(lambda: whole_lines(log)).strip())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        start_alone(
            KeptRole("one", 1), beats, log, [sys.executable, "-c", f"import os; print(os.getpid()); {OBEDIENT}"]
        )
    assert has_ended(int(started[0].split()[0]))


def test_a_note_of_an_earlier_start_that_a_power_loss_has_damaged_stops_no_role(tmp_path: Path) -> None:
    (tmp_path / "alive").mkdir()
    (tmp_path / "alive" / "actor-0.start").write_text('{"launcher": "on')
    with kept(tmp_path / "role.log", OBEDIENT) as process:
        assert pid_of_role(process) > 0
