"""The processes that a killed supervisor has left running: they end before the run starts again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import msgspec
import psutil
import pytest

from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.ownership import exclusively
from asyncrl.launch.survivors import end_elsewhere, end_here
from asyncrl.machine.activity import VARIABLE
from asyncrl.machine.identity import ProcessIdentity, boot_of, this_kernel
from asyncrl.runs.processes import ProcessRecord, read_records
from tests.helpers import until

pytestmark = pytest.mark.slow

SAVES = """
import pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(folder / "alive" / "learner").write_text("the checkpoint step-000001" if {saves} else "")
(folder / "ready").touch()
while not asked or {saves} is None: time.sleep(0.01)
while not (folder / "looked").exists(): time.sleep(0.01)
time.sleep(1.0)
(folder / "saved").touch()
(folder / "alive" / "learner").write_text("")
"""
SUPERVISOR = """
import pathlib, sys, time
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.supervisor import Supervisor
role = RoleCommand("learner", [sys.executable, "-c", {code!r}])
Supervisor([role], pathlib.Path({folder!r}), 1, "learner").run(lambda: False, lambda: None)
"""


def left_by_a_killed_supervisor(folder: Path, saves: bool | None) -> ProcessIdentity:
    """A learner without its supervisor. If it `saves`, it does so for a second after it was asked to end and after the
    file `looked` is there; None: it ignores that."""
    code = SAVES.format(folder=str(folder), saves=saves)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR.format(code=code, folder=str(folder))])
    until((folder / "ready").exists)
    learner = until(lambda: read_records(folder).get("learner")).identity
    supervisor.kill()
    supervisor.wait()
    assert isinstance(learner, ProcessIdentity)
    assert learner.is_alive
    return learner


@contextmanager
def showing_that_it_waits(folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Makes the file `looked` once the block waits for a role."""

    def show() -> None:
        until(lambda: "waiting up to" in caplog.text)
        (folder / "looked").touch()

    thread = Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_start_waits_for_a_learner_that_saves_after_its_supervisor_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = left_by_a_killed_supervisor(tmp_path, saves=True)
    with showing_that_it_waits(tmp_path, caplog):
        end_here(tmp_path, stop_s=0.1)
    assert not learner.is_alive
    assert (tmp_path / "saved").exists(), "it was not killed while it saved"
    assert f"learner, process {learner.pid} still runs, without its supervisor" in caplog.text
    assert "finishes the checkpoint step-000001; waiting up to 600 s" in caplog.text


def test_a_role_that_does_not_end_in_time_is_killed_with_what_it_has_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = left_by_a_killed_supervisor(tmp_path, saves=None)
    end_here(tmp_path, stop_s=0.1)
    assert not learner.is_alive
    assert not (tmp_path / "saved").exists()
    assert "did not end in time; killing it" in caplog.text


def test_a_role_that_no_file_knows_ends_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = left_by_a_killed_supervisor(tmp_path, saves=True)
    (tmp_path / "processes.json").write_text('{"learner": {"ho')
    with showing_that_it_waits(tmp_path, caplog):
        end_here(tmp_path, stop_s=0.1)
    assert not learner.is_alive
    assert (tmp_path / "saved").exists(), "it was not killed while it saved"


def record(folder: Path, **records: ProcessRecord) -> None:
    (folder / "processes.json").write_bytes(msgspec.json.encode(records))


def test_another_process_that_has_got_the_id_of_a_role_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        now = ProcessIdentity.of(other.pid)
        assert now is not None
        record(tmp_path, learner=ProcessRecord("here", other.pid, 0, now.kernel, f"{now.began}0", 600.0))
        end_here(tmp_path)
        assert now.is_alive
    finally:
        other.kill()
        other.wait()


def test_a_process_that_has_ended_is_not_alive_even_if_nobody_has_asked_for_its_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    assert identity.is_alive
    process.communicate(b"\n")
    assert not identity.is_alive
    zombie = subprocess.Popen([sys.executable, "-c", "pass"])
    until(lambda: ProcessIdentity.of(zombie.pid) is None)
    zombie.wait()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call is that of this architecture")
def test_a_process_whose_main_thread_alone_has_ended_is_alive() -> None:
    """Each process is in this state for a moment after it was killed: it still has its ports."""
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); ctypes.CDLL(None)"
    process = subprocess.Popen([sys.executable, "-c", f"{code}.syscall(60, 0)"])
    try:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert ProcessIdentity.of(process.pid) is not None
    finally:
        process.kill()
        process.wait()
    assert ProcessIdentity.of(process.pid) is None


def test_what_runs_on_a_machine_that_nobody_reaches_ends_with_its_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = (ProcessRecord(host, 7, 0, kernel, "1", 120.0) for host, kernel in (("b", "near"), ("c", "far")))
    with exclusively(tmp_path):
        record(tmp_path, actor=near)
        end_elsewhere(tmp_path, lambda stop: {"near"}, Event())
        assert "cannot be reached" not in caplog.text
        record(tmp_path, actor=near, learner=far)
        stop = Event()
        stop.set()
        with pytest.raises(StoppedError):
            end_elsewhere(tmp_path, lambda stop: {"near"}, stop)
        assert "learner on c cannot be reached; waiting up to 120 s" in caplog.text
        # The supervisor has not renewed the file for longer than the lease.
        long_ago = time.time() - 121.0
        os.utime(tmp_path / "processes.json", (long_ago, long_ago))
        end_elsewhere(tmp_path, lambda stop: set(), stop)


def test_the_wait_ends_once_the_user_deletes_the_record_as_the_warning_advises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with exclusively(tmp_path):
        record(tmp_path, learner=ProcessRecord("far", 7, 0, "far", "1", 600.0))

        def delete() -> None:
            until(lambda: "cannot be reached" in caplog.text)
            (tmp_path / "processes.json").unlink()

        user = Thread(target=delete)
        user.start()
        try:
            end_elsewhere(tmp_path, lambda stop: (), Event())
        finally:
            user.join()


def test_a_role_in_another_container_of_this_machine_is_waited_for_until_it_has_ended(tmp_path: Path) -> None:
    container, stop = f"{boot_of(this_kernel())}/pid:[1]", Event()
    stop.set()
    with exclusively(tmp_path):
        record(tmp_path, learner=ProcessRecord(socket.gethostname(), 7, 0, container, "1", 600.0))
        beats = tmp_path / "alive" / "learner"
        beats.parent.mkdir()
        with (
            pytest.MonkeyPatch.context() as patch,
            heartbeat_of_another_process(beats, patch),
            pytest.raises(StoppedError),
        ):
            end_elsewhere(tmp_path, lambda stop: (), stop)
        end_elsewhere(tmp_path, lambda stop: (), stop)


@contextmanager
def heartbeat_of_another_process(beats: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    code = "from asyncrl.machine.activity import *\nwith heartbeat(Activity(), 60.0): print(input(0))"
    patch.setenv(VARIABLE, str(beats))
    role = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert role.stdout is not None
    role.stdout.read(1)
    try:
        yield
    finally:
        role.communicate(b"\n")


def test_a_supervisor_on_a_machine_whose_locks_do_not_hold_here_is_noticed(tmp_path: Path) -> None:
    with exclusively(tmp_path):
        record(tmp_path, learner=ProcessRecord("far", 7, 0, "far", "1", 600.0))
        file, over = tmp_path / "processes.json", Event()

        def renew() -> None:
            # Again and again, as a supervisor does: the first time may come before anybody looks.
            while not over.wait(0.2):
                os.utime(file)

        renewing = Thread(target=renew)
        renewing.start()
        try:
            with pytest.raises(ConfigError, match="is being run by a process on another machine"):
                end_elsewhere(tmp_path, lambda stop: (), Event())
        finally:
            over.set()
            renewing.join()
