"""The supervisor: restarts what dies, gives up with the last lines, and leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.supervisor import WELL_S, RoleCommand, RunFailedError, Supervisor, pause_s
from tests.helpers import until

pytestmark = pytest.mark.slow


def script(name: str, code: str) -> RoleCommand:
    return RoleCommand(name, [sys.executable, "-c", code])


FOREVER = "import time\nwhile True: time.sleep(0.05)"


def supervise(tmp_path: Path, *roles: RoleCommand, max_restarts: int = 3, **options: Any) -> Supervisor:
    return Supervisor(roles, tmp_path, {"MARK": "yes"}, max_restarts, "learner", **options)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_run_is_done_when_the_learner_is_and_nobody_is_left(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, script("actor-0", FOREVER), script("learner", "pass"))
    pids = supervisor.pids
    assert supervisor.run(lambda: False, lambda: None, 0.01)
    assert not any(alive(pid) for pid in pids.values())


def test_a_role_that_dies_is_started_again_under_its_name(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, sys
file = pathlib.Path({str(tmp_path)!r}, "starts")
file.write_text((file.read_text() if file.exists() else "") + os.environ["ASYNCRL_WORKER"] + os.environ["MARK"] + "\\n")
sys.exit(0 if file.read_text().count("\\n") == 3 else 1)
"""
    supervisor = supervise(tmp_path, script("learner", code))
    assert supervisor.run(lambda: False, lambda: None, 0.01)
    assert supervisor.restarts == {"learner": 2}
    assert (tmp_path / "starts").read_text() == "learneryes\n" * 3


def test_only_the_learner_can_end_a_run_well(tmp_path: Path) -> None:
    """Whoever asks another role to stop has it started again: without an actor the learner would wait for ever."""
    code = f"""
import pathlib, sys
file = pathlib.Path({str(tmp_path)!r}, "starts")
with file.open("a") as starts: starts.write("x")
"""
    waits = f"""
import pathlib, time
file = pathlib.Path({str(tmp_path)!r}, "starts")
while not file.exists() or len(file.read_text()) < 2: time.sleep(0.01)
"""
    supervisor = supervise(tmp_path, script("actor-0", code), script("learner", waits))
    assert supervisor.run(lambda: False, lambda: None, 0.01)


def test_a_role_that_fails_a_thousand_times_is_started_again_all_the_same() -> None:
    assert [pause_s(failures, 60.0) for failures in (1, 2, 8, 9, 10, 2000)] == [0.25, 0.5, 32.0, 60.0, 60.0, 60.0]


@pytest.mark.parametrize(("status", "why"), [(2, "learner cannot run"), (3, "too much fails")])
def test_a_role_that_says_that_a_restart_is_useless_ends_the_run_with_its_message(
    tmp_path: Path, status: int, why: str
) -> None:
    log = tmp_path / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("what an earlier start said\n")
    supervisor = supervise(tmp_path, script("learner", f"import sys; print('mend the tool'); sys.exit({status})"))
    with pytest.raises(RunFailedError, match=rf"\A[^\n]*{why}[^\n]*\nmend the tool\Z"):
        supervisor.run(lambda: False, lambda: None, 0.01)
    assert supervisor.restarts == {"learner": 0}


def test_a_role_that_keeps_dying_ends_the_run_with_the_end_of_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dying = script("actor-0", "raise SystemExit('no engine here; this is the way out')")
    supervisor = supervise(tmp_path, dying, script("learner", FOREVER), max_restarts=1)
    with pytest.raises(RunFailedError, match=r"ended 2 times(.|\n)*no engine here"):
        supervisor.run(lambda: False, lambda: None, 0.01)
    assert "starting it again in 0.25 s; its log ends:\nno engine here; this is the way out" in caplog.text


class Clock:
    """Time that passes only when somebody waits for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pauses(folder: Path, log: pytest.LogCaptureFixture, runs: list[float], max_restarts: int = 100) -> list[float]:
    """The pauses of a role before each restart. It fails after so many seconds at each of its `runs`, then ends
    well."""
    clock, seen = Clock(), 0
    code = f"""
import pathlib, sys
with pathlib.Path({str(folder)!r}, "starts").open("a") as file: file.write("x")
sys.exit(0 if pathlib.Path({str(folder)!r}, "starts").stat().st_size > {len(runs)} else 1)
"""
    roles = [script("learner", code)]
    supervisor = Supervisor(roles, folder, {}, max_restarts, "learner", longest_pause_s=4.0, clock=clock)

    def progress() -> None:
        nonlocal seen
        starts = supervisor.restarts["learner"] + 1
        if starts > seen:
            # The supervisor has not yet looked whether this process ended.
            clock.now += [*runs, 0.0][starts - 1]
        elif "learner" not in supervisor.pids:
            clock.now += 0.25
        seen = starts

    assert supervisor.run(lambda: False, progress, 0.01)
    return [float(pause) for pause in re.findall("starting it again in (.*) s;", log.text)]


def test_a_role_that_fails_again_and_again_is_started_later_each_time_up_to_a_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pauses(tmp_path, caplog, [1.0] * 7) == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_old_failures_are_forgotten_once_a_role_ran_well_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pauses(tmp_path, caplog, [1.0, 1.0, WELL_S, 1.0, 1.0], max_restarts=3) == [0.25, 0.5, 0.25, 0.5, 1.0]


def test_a_role_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = f"import signal, pathlib\nsignal.signal(15, signal.SIG_IGN)\npathlib.Path({str(ready)!r}).touch()\n{FOREVER}"
    supervisor = supervise(tmp_path, script("learner", deaf), stop_s=0.3)
    until(ready.exists)
    pids = supervisor.pids
    assert not supervisor.run(lambda: True, lambda: None)
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_children_stop_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from asyncrl.launch.supervisor import RoleCommand, Supervisor
import sys
role = RoleCommand("learner", [sys.executable, "-c", {FOREVER!r}])
supervisor = Supervisor([role], pathlib.Path({str(tmp_path)!r}), {{}}, 1, "learner")
pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(supervisor.pids["learner"]))
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    file = tmp_path / "pid"
    pid = int(until(lambda: file.exists() and file.read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not alive(pid))
