"""A child that ends with its parent is the program that was asked for, in the process that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.machine.child import Guarded, ending_with_parent, group_has_ended, kill_group, start_child, start_guarded
from tests.helpers import has_ended, until, whole_lines

TELL = """
import json, os, signal, sys
ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
print(json.dumps([os.getpid(), sorted(os.sched_getaffinity(0)), sys.argv[1:], sorted(ignored)]))
"""


def test_the_program_runs_in_the_process_that_was_started_with_its_words_signals_and_cpus() -> None:
    words, cpu = ["", "a b", "--", "'\"$x"], min(os.sched_getaffinity(0))
    plain = [sys.executable, "-c", TELL, *words]
    with subprocess.Popen(plain, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        *_, ignored = json.loads(process.stdout.read())
    with subprocess.Popen(
        ending_with_parent(plain, signal.SIGTERM, frozenset({cpu})), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == [process.pid, [cpu], words, ignored]
    assert process.returncode == 0


def test_cpus_that_are_gone_bind_nothing() -> None:
    assert subprocess.run(ending_with_parent(["true"], signal.SIGTERM, frozenset({4095}))).returncode == 0


def test_a_program_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        start_child(["no-such-program"], tmp_path / "log", {})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pid"
    child = [
        sys.executable,
        "-c",
        f"import os, time; open({str(file)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)",
    ]
    parent = (
        "import signal, subprocess, time; from asyncrl.machine.child import ending_with_parent\n"
        f"subprocess.Popen(ending_with_parent({child!r}, signal.{number.name})); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        pid = int(until(lambda: file.exists() and file.read_text().endswith(" ") and file.read_text()))
        assert not has_ended(pid)
        process.kill()
    until(lambda: has_ended(pid))


@pytest.mark.slow
def test_a_guarded_program_leads_its_group_without_input_and_all_of_it_is_killed(tmp_path: Path) -> None:
    code = "import os, subprocess; subprocess.Popen(['sleep', '600']); print(os.getpgid(0), os.read(0, 1), flush=True)"
    log = tmp_path / "log"
    process = start_guarded([sys.executable, "-c", f"{code}; import time; time.sleep(600)"], log, {})
    assert until(lambda: whole_lines(log)) == f"{process.pid} b''\n"
    assert not group_has_ended(process.pid)
    kill_group(process)
    until(lambda: group_has_ended(process.pid))


@pytest.mark.slow
def test_a_child_of_a_guarded_program_in_a_session_of_its_own_ends_when_the_starter_is_killed(tmp_path: Path) -> None:
    log, others = tmp_path / "log", subprocess.Popen(["sleep", "600"], start_new_session=True)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    server = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    starter = (
        "import sys, time; from pathlib import Path; from asyncrl.machine.child import start_guarded\n"
        f"start_guarded([sys.executable, '-c', {server!r}], Path({str(log)!r}), {{}}); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    try:
        pid = int(until(lambda: whole_lines(log)))
        assert not has_ended(pid), "its parent has ended, and was no reason to end"
        process.kill()
        until(lambda: has_ended(pid))
        assert others.poll() is None
    finally:
        for each in (process, others):
            each.kill()
            each.wait()


SPEAKER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, input(), flush=True)
"""


def start_speaker(guard: Guarded) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        guard.command, stdin=pipe, stdout=pipe, pass_fds=guard.files, start_new_session=True, text=True
    )


@pytest.mark.slow
def test_a_guarded_program_has_its_own_pipes_and_what_it_leaves_ends_when_its_guard_is_closed() -> None:
    with Guarded([sys.executable, "-c", SPEAKER]) as guard, Guarded([sys.executable, "-c", SPEAKER]) as other:
        with start_speaker(guard) as process, start_speaker(other) as another:
            left, said = process.communicate("hello\n")[0].split()
            others, _ = another.communicate("hello\n")[0].split()
        assert said == "hello", "the program reads its own input, and its output ends with it"
        assert not has_ended(int(left)), "the guard waits until it is closed"
        guard.close()
        guard.close()
        until(lambda: has_ended(int(left)))
        assert not has_ended(int(others))
    until(lambda: has_ended(int(others)))


def pipe_of(pid: int, descriptor: int) -> str:
    """The pipe that a process has open under a number; empty if it has none, or has ended."""
    try:
        return str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
    except OSError:
        return ""


def ignored_signals(pid: int) -> set[int]:
    """The signals that a process ignores; none if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


@pytest.mark.slow
def test_a_guard_outlives_the_signals_that_a_scheduler_sends_to_all_processes_of_a_job() -> None:
    scheduler = {signal.SIGTERM, signal.SIGINT}

    def keepers() -> list[int]:
        # Guards of other tests may have the same command, but not the same pipe.
        (watched,) = guard.files
        others = [pid for pid in psutil.pids() if pid not in (os.getpid(), process.pid)]
        found = [pid for pid in others if pipe_of(pid, watched) == pipe_of(os.getpid(), watched)]
        return [pid for pid in found if scheduler <= ignored_signals(pid)]

    with Guarded([sys.executable, "-c", SPEAKER]) as guard, start_speaker(guard) as process:
        try:
            (keeper,) = until(keepers)
            # A shell starts what it runs in the background with SIGINT ignored, and so these tests.
            added = ignored_signals(process.pid) - ignored_signals(os.getpid())
            assert not scheduler & added, "the program itself ends by them"
            for number in scheduler:
                os.kill(keeper, number)
        finally:
            left = process.communicate("hello\n")[0].split()[0]
        guard.close()
        until(lambda: has_ended(int(left)))


def test_a_guarded_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    process = start_guarded(["no-such-program"], tmp_path / "log", {})
    assert process.wait() == 1
    assert process.stdin is not None
    process.stdin.close()
    assert (tmp_path / "log").read_text() == "no-such-program: No such file or directory\n"
