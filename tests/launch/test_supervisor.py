"""The supervisor: it restarts roles that die, gives up with their last lines, and leaves no process running."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.role_process import LocalProcess, RoleCommand, RoleProcess
from asyncrl.launch.supervisor import WELL_S, RunFailedError, Supervisor, pause_s
from tests.helpers import GENEROUS_S, has_ended, until

pytestmark = pytest.mark.slow


def script(name: str, code: str) -> RoleCommand:
    return RoleCommand(name, [sys.executable, "-c", code], {"MARK": "yes"})


FOREVER = "import time\nwhile True: time.sleep(0.05)"


def supervise(tmp_path: Path, *roles: RoleCommand, max_restarts: int = 3, **options: Any) -> Supervisor:
    return Supervisor(roles, tmp_path, max_restarts, "learner", **options)


def test_the_run_is_done_when_the_learner_is_and_nobody_is_left(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, script("actor-0", FOREVER), script("learner", "pass"))
    pids = supervisor.pids
    assert "actor-0" in pids
    assert supervisor.run(lambda: False, lambda: None, 0.01)
    assert all(has_ended(pid) for pid in pids.values())


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
    """Other roles that are asked to stop are started again: without an actor the learner would wait for ever."""
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


@pytest.mark.parametrize(("status", "why"), [(2, "learner cannot run"), (3, "learner has ended the run")])
def test_a_role_that_says_that_a_restart_is_useless_ends_the_run_with_its_message(
    tmp_path: Path, status: int, why: str
) -> None:
    log = tmp_path / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("what an earlier start said\n")
    said = "some log line\\nasyncrl: mend the tool\\nasyncrl: mend the tool\\n2026 a last line"
    supervisor = supervise(tmp_path, script("learner", f"import sys; print('{said}'); sys.exit({status})"))
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


BEATS = """
import pathlib, sys, time
from asyncrl.machine.activity import Activity, heartbeat
activity, folder = Activity(), pathlib.Path({folder!r})
with heartbeat(activity, 5.0):
    activity.enter("work")
{body}
"""


def beating(name: str, folder: Path, body: str) -> RoleCommand:
    """A role with heartbeats."""
    return script(name, BEATS.format(folder=str(folder), body=textwrap.indent(textwrap.dedent(body), "    ")))


@pytest.mark.heavy
def test_a_role_that_is_stopped_or_stuck_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One cannot run, the main thread of the other does not advance, and a third one advances for longer than that."""
    goes_on = """
(folder / "runs").touch()
while True: activity.advance(); time.sleep(0.05)
"""
    stuck = """
file = folder / "second"
if not file.exists(): file.touch(); time.sleep(1000)
while True: activity.advance(); time.sleep(0.05)
"""
    ends = """
while not (folder / "end").exists(): activity.advance(); time.sleep(0.05)
"""
    roles = [beating("actor-0", tmp_path, goes_on), beating("scoring-0", tmp_path, stuck)]
    supervisor = supervise(tmp_path, *roles, beating("learner", tmp_path, ends), max_restarts=100, hang_s=5.0)
    stopped = supervisor.pids["actor-0"]

    def progress() -> None:
        restarts = supervisor.restarts
        if not (tmp_path / "stopped").exists() and (tmp_path / "runs").exists():
            os.kill(stopped, signal.SIGSTOP)
            (tmp_path / "stopped").touch()
        if restarts["actor-0"] and restarts["scoring-0"]:
            (tmp_path / "end").touch()

    assert supervisor.run(lambda: False, progress, 0.05)
    assert has_ended(stopped)
    for name in ("actor-0", "scoring-0"):
        assert f"{name} hangs: it gave no sign of life for 5 s (cluster.hang_timeout_s)" in caplog.text
    assert "the main thread has not advanced" in (tmp_path / "logs" / "scoring-0.log").read_text()


@pytest.mark.parametrize(("finish_s", "finished"), [(200.0, True), (0.6, False)])
def test_a_stop_waits_for_a_role_that_finishes_something_within_a_limit(
    finish_s: float, finished: bool, tmp_path: Path
) -> None:
    body = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with activity.finishing("the checkpoint step-000001"):
    (folder / "ready").touch()
    while not (folder / "asked").exists(): time.sleep(0.01)
    time.sleep({2.5 if finished else 600.0})
    (folder / "finished").touch()
"""
    supervisor = supervise(tmp_path, beating("learner", tmp_path, body), stop_s=0.3, finish_s=finish_s)
    until(lambda: (tmp_path / "alive" / "learner").read_text())
    (tmp_path / "asked").touch()
    assert not supervisor.run(lambda: True, lambda: None)
    assert (tmp_path / "finished").exists() is finished


DRAINS = """
import pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))
(folder / "ready").touch()
while not asked: time.sleep(0.01)
assert (folder / "learner_runs").exists()
time.sleep(0.3)
(folder / "drained").touch()
if {hangs}: time.sleep(1000)
"""
LEARNS = """
import pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
def stop(*_):
    (folder / "stopped_after_drain").write_text(str((folder / "drained").exists()))
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
(folder / "learner_runs").touch()
while not (folder / "end").exists(): time.sleep(0.01)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_stop_lets_actors_finish_their_episodes_while_the_others_go_on(hangs: bool, tmp_path: Path) -> None:
    actor = replace(script("actor-0", DRAINS.format(folder=str(tmp_path), hangs=hangs)), drains=True)
    learner = script("learner", LEARNS.format(folder=str(tmp_path)))

    def clock() -> float:
        """The time of the actor is over as soon as it hangs."""
        return time.monotonic() + (1e6 if hangs and (tmp_path / "drained").exists() else 0.0)

    supervisor = supervise(tmp_path, actor, learner, drain_s=GENEROUS_S, stop_s=GENEROUS_S, clock=clock)
    pids = supervisor.pids
    until(lambda: (tmp_path / "ready").exists() and (tmp_path / "learner_runs").exists())
    assert not supervisor.run(lambda: True, lambda: None, 0.01)
    assert (tmp_path / "stopped_after_drain").read_text() == "True"
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids.values())


def test_a_run_that_is_done_waits_for_no_episodes(tmp_path: Path) -> None:
    actor = replace(script("actor-0", DRAINS.format(folder=str(tmp_path), hangs=False)), drains=True)
    supervisor = supervise(tmp_path, actor, script("learner", "pass"), drain_s=1000.0)
    assert supervisor.run(lambda: False, lambda: None, 0.01)
    assert not (tmp_path / "drained").exists()


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
    supervisor = Supervisor(roles, folder, max_restarts, "learner", longest_pause_s=4.0, clock=clock)

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
    assert len(pids) == 1
    assert not supervisor.run(lambda: True, lambda: None)
    assert all(has_ended(pid) for pid in pids.values())


ENDS = """
import pathlib, signal, sys, time
folder, name, awaited = pathlib.Path({folder!r}), {name!r}, {awaited!r}
def end(*_):
    while awaited and not (folder / f"{{awaited}}-ended").exists(): time.sleep(0.01)
    with (folder / "order").open("a") as file:
        file.write(f"{{name}} ")
    (folder / f"{{name}}-ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
(folder / name).touch()
while True: time.sleep(0.05)
"""


def test_actors_end_while_a_learner_saves_and_the_replay_that_both_still_talk_to_ends_last(tmp_path: Path) -> None:
    def ends(name: str, awaited: str = "") -> RoleCommand:
        return script(name, ENDS.format(folder=str(tmp_path), name=name, awaited=awaited))

    roles = [replace(ends("replay"), ends_last=True), ends("actor-0"), ends("learner", awaited="actor-0")]
    supervisor = supervise(tmp_path, *roles, stop_s=GENEROUS_S)
    until(lambda: all((tmp_path / role.name).exists() for role in roles))
    assert not supervisor.run(lambda: True, lambda: None)
    assert (tmp_path / "order").read_text() == "actor-0 learner replay "


def test_a_role_that_does_not_stop_is_killed_while_another_one_finishes_something(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with activity.finishing("the checkpoint step-000001"):
    while not (folder / "gone").exists(): time.sleep(0.01)
"""
    ready = tmp_path / "ready"
    deaf = f"import signal, pathlib\nsignal.signal(15, signal.SIG_IGN)\npathlib.Path({str(ready)!r}).touch()\n{FOREVER}"
    supervisor = supervise(tmp_path, beating("learner", tmp_path, saves), script("actor-0", deaf), stop_s=0.3)
    until(lambda: ready.exists() and (tmp_path / "alive" / "learner").read_text())
    actor = supervisor.pids["actor-0"]
    gone = threading.Thread(target=lambda: (until(lambda: has_ended(actor)), (tmp_path / "gone").touch()))
    gone.start()
    assert not supervisor.run(lambda: True, lambda: None)
    gone.join()
    assert re.findall("(.*) did not stop in time", "\n".join(caplog.messages)) == ["actor-0"]


class OutOfReach:
    """A role on a host that cannot be reached: it never seems to end."""

    pid, host, identity, lease_s = 1, "away", None, 100.0

    def __init__(self) -> None:
        self.kills = 0

    def poll(self) -> int | None:
        return None

    def terminate(self) -> None:
        pass

    drain = terminate

    def kill(self) -> None:
        self.kills += 1


def test_a_role_that_nobody_can_reach_is_killed_once_and_again_at_the_end(tmp_path: Path) -> None:
    away, polls = OutOfReach(), iter(range(40))
    supervisor = supervise(tmp_path, RoleCommand("learner", []), start=lambda *_: away, stop_s=0.05, killed_s=0.1)
    supervisor.restart(["learner"])
    assert not supervisor.run(lambda: next(polls) == 39, lambda: None, 0.01)
    assert away.kills == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_children_stop_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.supervisor import Supervisor
import sys
role = RoleCommand("learner", [sys.executable, "-c", {FOREVER!r}])
supervisor = Supervisor([role], pathlib.Path({str(tmp_path)!r}), 1, "learner")
pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(supervisor.pids["learner"]))
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    file = tmp_path / "pid"
    pid = int(until(lambda: file.exists() and file.read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: has_ended(pid))


def test_roles_come_and_go_while_the_run_goes_on(tmp_path: Path) -> None:
    actors = [script(f"actor-{index}", FOREVER) for index in range(3)]
    waits = f"""
import pathlib, time
while not pathlib.Path({str(tmp_path)!r}, "done").exists(): time.sleep(0.01)
"""
    supervisor = supervise(tmp_path, *actors[:2], script("learner", waits))
    first = supervisor.pids
    steps = iter(
        [
            lambda: supervisor.set_roles([actors[0], actors[2], script("learner", waits)]),
            lambda: has_ended(first["actor-1"]) and supervisor.pids.keys() == {"actor-0", "actor-2", "learner"},
            lambda: supervisor.set_roles([*actors, script("learner", waits)]),
            lambda: supervisor.pids.keys() == {"actor-0", "actor-1", "actor-2", "learner"},
            lambda: supervisor.restart(["actor-0"]),
            lambda: supervisor.pids.get("actor-0", first["actor-0"]) != first["actor-0"],
            lambda: (tmp_path / "done").touch(),
        ]
    )
    step = next(steps)

    def progress() -> None:
        nonlocal step
        if step() is not False:
            step = next(steps, lambda: False)

    assert supervisor.run(lambda: False, progress, 0.01)
    assert supervisor.restarts == {"learner": 0, "actor-0": 1, "actor-1": 0, "actor-2": 0}
    told = json.loads((tmp_path / "processes.json").read_text())
    assert told["actor-0"]["restarts"] == 1
    assert (told["learner"]["pid"], told["learner"]["host"]) == (0, socket.gethostname())


def test_a_role_that_is_not_wanted_any_more_drains_also_without_a_time_for_it(tmp_path: Path) -> None:
    actor = replace(script("actor-0", DRAINS.format(folder=str(tmp_path), hangs=False)), drains=True)
    learner = script("learner", LEARNS.format(folder=str(tmp_path)))
    supervisor = supervise(tmp_path, actor, learner, drain_s=0.0)
    until(lambda: (tmp_path / "ready").exists() and (tmp_path / "learner_runs").exists())
    supervisor.set_roles([learner])

    def progress() -> None:
        if (tmp_path / "drained").exists():
            (tmp_path / "end").touch()

    assert supervisor.run(lambda: False, progress, 0.01)


def test_a_role_that_the_system_cannot_start_now_is_started_later(tmp_path: Path) -> None:
    code = "import pathlib, sys; done = pathlib.Path(sys.argv[1]); was = done.exists(); done.touch(); sys.exit(not was)"
    role, starts = RoleCommand("learner", [sys.executable, "-c", code, str(tmp_path / "done")]), count(1)

    def start(role: RoleCommand, log_file: Path, environment: Mapping[str, str]) -> RoleProcess:
        if next(starts) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return LocalProcess(role, log_file, environment)

    supervisor = Supervisor([role], tmp_path, 2, "learner", start=start)
    assert supervisor.run(lambda: False, lambda: None)
    assert supervisor.restarts == {"learner": 2}
