"""Each program has a user of its own as long as any of its processes lives: real programs of launchers whose process
ids a test chooses, in namespaces of processes that stand for containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.sandbox import sandbox
from tests.helpers import GENEROUS_S

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
OPEN_PYTHON = """
mount --bind "$2" /mnt && mount -t tmpfs -o mode=755 tmpfs "$1" && mkdir -p "$2" && mount --bind /mnt "$2" || exit 1
shift 2
exec "$@"
"""
"""Opens the folder $1 that hides the Python in $2 from other users, who need it without namespaces; runs the rest."""
RUNNER = f"""
import asyncio, os, signal, sys
import psutil
from asyncrl.sandbox import sandbox

namespaces, kill, *launchers = map(int, sys.argv[1:])
held, hold = os.pipe()

async def start(launcher):
    # The user of a program with 40 threads, which waits until this process ends.
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(launcher - 1))
    told, tell = os.pipe()
    os.set_blocking(told, False)
    program = (
        "import os, threading, time\\n"
        "for _ in range(40): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\\n"
        f"os.write({{tell}}, b'%d' % os.getuid()); os.read({{held}}, 1)"
    )
    limits = sandbox.SandboxLimits(wall_s={GENEROUS_S}, cpu_s={GENEROUS_S}, memory_mb=1 << 15)
    run = asyncio.create_task(sandbox.run(program, limits, fds=[tell, held], namespaces=bool(namespaces)))
    while not run.done():
        try:
            return run, int(os.read(told, 99))
        except BlockingIOError:
            await asyncio.sleep(0.01)
    raise RuntimeError(run.result().printed)

async def main():
    users = []
    for launcher in launchers:
        run, user = await start(launcher)
        users.append(user)
        assert "sandbox.child" in " ".join(psutil.Process(launcher).cmdline())
        if kill:
            os.kill(launcher, signal.SIGKILL)
            await run
            assert user in [each.info["uids"].real for each in psutil.process_iter(["uids"])]
    print(*users, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def grants_containers() -> bool:
    """True if a process may have a namespace of processes here, and choose its ids."""
    command = [*CONTAINER, "sh", "-c", "echo 100 > /proc/sys/kernel/ns_last_pid"]
    return bool(shutil.which("unshare")) and subprocess.run(command, check=False, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not grants_containers(), reason="programs have users for root alone"),
]


@pytest.fixture(
    params=[
        pytest.param(True, marks=pytest.mark.skipif(bool(sandbox.why_no_namespaces()), reason="no namespaces here")),
        False,
    ],
    ids=["namespaces", "plain"],
)
def either(request: pytest.FixtureRequest) -> bool:
    """True if programs get namespaces."""
    return bool(request.param)


def opening_python() -> list[str]:
    closed = [str(each) for each in Path(sys.base_prefix).parents if not each.stat().st_mode & 1]
    return ["sh", "-c", OPEN_PYTHON, "sh", closed[-1], sys.base_prefix] if closed else []


@contextmanager
def container(namespaces: bool, *launchers: int, kill: bool = False) -> Iterator[list[int]]:
    """The users of programs that run at once, each with a launcher of this process id. `kill`: the launcher is killed,
    and with it the watcher, before the next program starts."""
    arguments = map(str, map(int, (namespaces, kill, *launchers)))
    command = [*CONTAINER, *opening_python(), sys.executable, "-c", RUNNER, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        try:
            users = list(map(int, runner.stdout.readline().split()))
            assert 0 not in users
            yield users
        finally:
            runner.stdin.close()


def test_programs_whose_process_ids_are_far_apart_have_users_and_limits_of_their_own(either: bool):
    with container(either, 10, 10_010, 15_010, 20_010) as users:
        assert len(set(users)) == 4


def test_programs_of_two_containers_with_the_same_process_ids_have_users_of_their_own(either: bool):
    with container(either, 10) as ours, container(either, 10) as theirs, container(either, 10) as others:
        assert len({*ours, *theirs, *others}) == 3


def test_a_program_that_has_lost_its_watcher_keeps_its_user():
    with container(False, 10, 10, kill=True) as users:
        assert len(set(users)) == 2


def test_the_user_of_a_program_that_has_ended_is_free_again(either: bool):
    # No other launcher has the id of this process, so no other program on this machine tries the same user first.
    launcher = os.getpid()
    with container(either, launcher) as users:
        pass
    with container(either, launcher) as again:
        assert again == users


def test_with_few_ids_a_program_takes_one_that_is_free_and_fails_when_none_is():
    # Another run of this test at the same time has other ids.
    first = 0x70000000 + 3 * os.getpid()
    code = f"""
import os, sys
from asyncrl.sandbox.child.rights import take_user
held, hold = os.pipe()
for _ in range(4):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(hold)
        try:
            user = str(take_user(range({first}, {first + 3}), 3))
        except OSError as error:
            user = error.strerror
        os.write(write, user.encode())
        os.read(held, 1)
        os._exit(0)
    print(os.read(read, 999).decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *users, failure = done.stdout.splitlines()
    assert users[0] == str(first)
    assert set(users) == {str(first + each) for each in range(3)}
    assert "none of 100 user ids is free" in failure
