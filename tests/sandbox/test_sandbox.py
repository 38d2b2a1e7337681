"""Real programs cannot reach anything that they must not, with namespaces and without."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.sandbox import sandbox
from tests.helpers import GENEROUS_S, NEVER_BEGINS, async_until, living, until

pytestmark = pytest.mark.slow

LIMITS = sandbox.SandboxLimits(wall_s=GENEROUS_S, cpu_s=GENEROUS_S)
PROCESSES = {True: 3, False: 2}
"""The number of processes of a call, with namespaces and without: the launcher, the watcher and the program.

Without namespaces the launcher is the watcher.
"""

RUNNER = """
import asyncio, json, sys
from asyncrl.sandbox import sandbox
ran = asyncio.run(sandbox.run(sys.stdin.read(), sandbox.SandboxLimits(wall_s=120, cpu_s=60), namespaces=True))
print(json.dumps([ran.printed, ran.status]))
"""
ORDINARY = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps"]
"""A user who is not root of this machine, even if root runs the tests."""

Run = Callable[[str], sandbox.ProgramResult]

needs_namespaces = pytest.mark.skipif(bool(sandbox.why_no_namespaces()), reason="this system grants no namespaces")


def run(program: str, **options: bool) -> sandbox.ProgramResult:
    return asyncio.run(sandbox.run(program, LIMITS, **options))


def run_as_ordinary_user(program: str) -> sandbox.ProgramResult:
    command = [*ORDINARY, sys.executable, "-c", RUNNER]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sandbox.ProgramResult(*json.loads(done.stdout))


def ordinary_users_can() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*ORDINARY, "true"], check=False).returncode == 0


@pytest.fixture(params=["whoever runs this", "an ordinary user"])
def confined(request: pytest.FixtureRequest) -> Run:
    """A program in namespaces: root makes them itself, another user within a user namespace."""
    if request.param == "whoever runs this":
        return run
    if not ordinary_users_can():
        pytest.skip("this system grants user namespaces to root alone")
    return run_as_ordinary_user


@pytest.fixture(params=[pytest.param(True, marks=needs_namespaces), False], ids=["namespaces", "plain"])
def either(request: pytest.FixtureRequest) -> bool:
    """True if programs get namespaces."""
    return bool(request.param)


def alive(mark: str) -> list[psutil.Process]:
    """Processes other than this one that carry `mark` in their arguments."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if mark in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


ESCAPES = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
started, start = os.pipe()
def sleeper():
    os.set_inheritable(start, True)
    os.execv(sys.executable, [sys.executable, "-c", f"import os, time; os.close({{start}}); time.sleep(600)", {mark!r}])
libc.prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    libc.prctl(1, 0, 0, 0, 0)
    libc.prctl(36, 0, 0, 0, 0)
    if os.fork() == 0:
        os.setsid()
        sleeper()
    os._exit(0)
os.wait()
if os.fork() == 0:
    for each in (1, 2, 3, 15):
        __import__("signal").signal(each, __import__("signal").SIG_IGN)
    sleeper()
os.close(start)
os.read(started, 1)
import time
{end}
"""
"""Comes to its end when both sleepers run, and carry their mark."""


def two(sleepers: list[psutil.Process]) -> list[psutil.Process]:
    """The sleepers of ESCAPES, once there are both."""
    return sleepers if len(sleepers) == 2 else []


def test_the_signals_by_which_slurm_asks_an_actor_to_stop_or_drain_do_not_end_a_program(either: bool):
    program = "import os, signal; [os.kill(os.getpid(), each) for each in (signal.SIGUSR1, signal.SIGUSR2)]; print(1)"
    assert run(program, namespaces=either).printed == "1\n"


def test_nothing_outlives_a_call_that_leaves_its_session_and_its_parent(either: bool):
    mark = f"escaped-{os.getpid()}-{either}"
    ran = run(ESCAPES.format(mark=mark, end="print('gone')"), namespaces=either)
    assert (ran.printed, ran.status) == ("gone\n", 0)
    assert alive(mark) == []


def test_nothing_outlives_a_call_that_is_cancelled(either: bool):
    mark = f"cancelled-{os.getpid()}-{either}"

    async def main() -> None:
        program = ESCAPES.format(mark=mark, end="time.sleep(600)")
        before = set(psutil.Process().children(recursive=True))
        call = asyncio.create_task(sandbox.run(program, LIMITS, namespaces=either))
        sleepers = await async_until(lambda: two(alive(mark)))
        started = set(psutil.Process().children(recursive=True)) - before
        assert len({*started, *sleepers}) == PROCESSES[either] + 2
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert living({*started, *sleepers}) == []

    asyncio.run(main())


@pytest.mark.parametrize("reads", [True, False], ids=["", "that has read nothing"])
def test_nothing_outlives_a_caller_that_is_killed(either: bool, reads: bool, tmp_path: Path):
    mark = f"orphaned-{os.getpid()}-{either}-{reads}"
    program = "open('written', 'w').write('x')\n" + ESCAPES.format(mark=mark, end="time.sleep(600)")
    code = (
        "import asyncio, sys; from asyncrl.sandbox import sandbox\n"
        f"if not {reads}: sandbox._report = lambda *_: asyncio.sleep(600)\n"
        f"asyncio.run(sandbox.run(sys.stdin.read(), sandbox.SandboxLimits(600, 60), namespaces={either}))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdin is not None
        caller.stdin.write(program)
        caller.stdin.close()
        sleepers = until(lambda: two(alive(mark)))
        started = psutil.Process(caller.pid).children(recursive=True)
        assert len({*started, *sleepers}) == PROCESSES[either] + 2
        assert len(list(tmp_path.glob("*/written"))) == (not either)
        caller.send_signal(signal.SIGKILL)
    until(lambda: not living({*started, *sleepers}))
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_starts_too_many_processes_is_held_or_stopped(either: bool):
    mark = f"many-{os.getpid()}-{either}"
    program = f"""
import subprocess, sys, time
started = 0
try:
    while started < 600:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", {mark!r}])
        started += 1
    time.sleep(600)
except BlockingIOError:
    print(started)
"""
    ran = run(program, namespaces=either)
    assert ran.killed or int(ran.printed) < LIMITS.processes
    assert alive(mark) == []


def test_processes_have_the_memory_together(either: bool):
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (100 << 20)
        break
while True:
    time.sleep(1)
"""
    limits = sandbox.SandboxLimits(wall_s=GENEROUS_S, cpu_s=GENEROUS_S, memory_mb=300)
    assert asyncio.run(sandbox.run(program, limits, namespaces=either)).killed


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A folder as a run on this machine has it: a key file, a run's folder, and sockets on which somebody listens."""
    (tmp_path / "client.secret").write_text("a secret key")
    (tmp_path / "client.secret").chmod(0o600)
    (tmp_path / "run").mkdir(mode=0o777)
    (tmp_path / "run" / "data.mdb").write_text("trajectories")
    name = f"/tmp/asyncrl-test-{os.getpid()}.socket"
    with socket.socket(socket.AF_UNIX) as path, socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
        path.bind(name)
        abstract.bind(f"\0asyncrl-test-{os.getpid()}")
        tcp.bind(("127.0.0.1", 0))
        for each in (path, abstract, tcp):
            each.listen()
        (tmp_path / "port").write_text(str(tcp.getsockname()[1]))
        yield tmp_path
    Path(name).unlink()


REACH = {
    "read a key file": "print(open({folder!r} + '/client.secret').read())",
    "delete a run's folder": "import shutil; shutil.rmtree({folder!r} + '/run')",
    "see the folder of a run": "import os; print(os.listdir({folder!r}))",
    "reach a unix socket by its path": "import socket; socket.socket(socket.AF_UNIX).connect({socket!r})",
    "reach a unix socket by its name": "import socket; socket.socket(socket.AF_UNIX).connect('\\0asyncrl-test-{pid}')",
    "reach a loopback port": "import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
    "reach the network": "import socket; socket.create_connection(('192.0.2.1', 80), 5)",
    "signal another process": "import os; os.kill({pid}, 0)",
    "write its watcher's memory": "open('/proc/1/mem', 'r+b')",
    "read its watcher's environment": "print(open('/proc/1/environ').read(1))",
    "trace its watcher": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) < 0: raise OSError",
    "write among the system's files": "open('/usr/lib/asyncrl-test', 'w')",
    "write beside Python": "import os; open(os.__file__ + '.test', 'w')",
    "write to the root folder": "open('/asyncrl-test', 'w')",
    "change a setting of the machine": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "fill the private folder": "for i in range(99): open(f'/tmp/{{i}}', 'wb').write(bytes(1 << 20))",
    "fill the shared memory": "for i in range(99): open(f'/dev/shm/{{i}}', 'wb').write(bytes(1 << 20))",
    "make endless small files": "for i in range(99999): open(f'/tmp/{{i}}', 'wb').close()",
    "get new rights in a user namespace": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) < 0: raise PermissionError"
    ),
    "reach the machine below by vsock": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "take shared memory that no limit counts": (
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) < 0: raise MemoryError"
    ),
    "leave its root folder": "import os; os.chroot('/tmp')",
    "mount": "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None): raise OSError",
    "find the environment of others": (
        "import glob\nfor each in glob.glob('/proc/[0-9]*/environ'):\n"
        "    if each != '/proc/1/environ' and b'HOME=/tmp' not in open(each, 'rb').read(): print(each)\nraise OSError"
    ),
}


@needs_namespaces
@pytest.mark.parametrize("what", REACH)
def test_a_program_in_namespaces_cannot(what: str, confined: Run, machine: Path):
    values = {
        "folder": str(machine),
        "socket": f"/tmp/asyncrl-test-{os.getpid()}.socket",
        "pid": os.getpid(),
        "port": (machine / "port").read_text(),
    }
    ran = confined(REACH[what].format(**values))
    assert ran.status == 1
    assert "Error" in ran.printed.splitlines()[-1]
    assert (machine / "run" / "data.mdb").read_text() == "trajectories"


@needs_namespaces
def test_a_programs_signals_do_not_reach_its_watcher(confined: Run):
    program = """
import contextlib, os, signal, time
for number in signal.valid_signals():
    with contextlib.suppress(OSError):
        os.kill(1, number)
time.sleep(0.1)
print("still here")
"""
    assert confined(program) == sandbox.ProgramResult("still here\n", 0)


@needs_namespaces
def test_a_program_in_namespaces_can_do_what_programs_do(confined: Run):
    program = """
import hashlib, json, math, multiprocessing, os, random, ssl, subprocess, sys, tempfile, threading, time, uuid
import numpy
with tempfile.TemporaryDirectory() as folder:
    open(os.path.join(folder, "a"), "w").write("x")
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
assert subprocess.run(["ls", "/"], capture_output=True).returncode == 0
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
assert len(os.urandom(3)) == 3 and open("/dev/null").read() == ""
assert os.listdir("/proc/self/fd")
print(numpy.ones((3, 3)).sum(), os.getcwd(), __name__)
"""
    assert confined(program) == sandbox.ProgramResult("9.0 /tmp __main__\n", 0)


def test_input_and_open_files_reach_the_program(either: bool):
    read, write = os.pipe()
    try:
        program = f"import os; print(input(), input()); os.write({write}, b'there')"
        ran = asyncio.run(sandbox.run(program, LIMITS, stdin="one\nzwö".encode(), fds=[write], namespaces=either))
        assert ran == sandbox.ProgramResult("one zwö\n", 0)
        assert os.read(read, 99) == b"there"
    finally:
        os.close(read)
        os.close(write)


def test_a_program_that_kills_its_watcher_is_stopped_and_no_failure_of_the_sandbox():
    ran = run("import os, time; os.kill(os.getppid(), 9); time.sleep(5)", namespaces=False)
    assert ran.killed or "PermissionError" in ran.printed


def test_a_program_whose_time_ends_before_its_first_line_is_a_failure_of_the_sandbox(
    either: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sandbox, "child_command", lambda _: NEVER_BEGINS)
    limits = sandbox.SandboxLimits(wall_s=0.001)
    with pytest.raises(sandbox.SandboxError, match=r"could not begin within its 0\.001 s: run fewer programs at once"):
        asyncio.run(sandbox.run("print(1)", limits, namespaces=either))


def test_a_program_that_is_killed_before_its_first_line_is_a_failure_of_the_sandbox(
    either: bool, monkeypatch: pytest.MonkeyPatch
):
    *python, code = sandbox.child_command("main")
    killed = code.replace("main()", "main.__globals__['find_packages'] = lambda: os.kill(os.getpid(), 9); main()")
    monkeypatch.setattr(sandbox, "child_command", lambda _: [*python, f"import os; {killed}"])
    with pytest.raises(sandbox.SandboxError, match="ended before its first line: status 137"):
        run("print(1)", namespaces=either)


@pytest.mark.skipif(not ordinary_users_can(), reason="nothing to refuse here")
def test_a_system_that_refuses_namespaces_is_named_once_and_programs_still_run():
    code = """
import asyncio, logging
logging.basicConfig(format="%(message)s")
from asyncrl.sandbox import sandbox
for _ in range(2):
    assert sandbox.why_no_namespaces()
    print(asyncio.run(sandbox.run("print(5)", sandbox.SandboxLimits(wall_s=120))).printed)
"""
    refusing = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all "$@"'
    command = [*ORDINARY, "sh", "-c", refusing, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["5", "5"], done.stderr
    assert done.stderr.count("programs of the policy run without namespaces (") == 1
    assert "unshare: No space left on device" in done.stderr
