"""Learner and servers never have their GPUs at the same time, and who dies has them no more."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncrl.machine.gpu_lock import LearnerLock, ServersLock
from tests.helpers import has_ended, until, whole_lines

HOLD = """
import sys, time
from pathlib import Path
from asyncrl.machine.gpu_lock import LearnerLock, ServersLock
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run whose first version was published."""
    lock = LearnerLock(tmp_path, 0)
    lock.give_back(0)
    lock.close()
    return tmp_path


def test_servers_get_no_gpu_before_the_first_version(tmp_path: Path) -> None:
    servers = ServersLock(tmp_path, 1)
    assert (servers.take(), servers.version()) == (False, -1)
    LearnerLock(tmp_path, 0).give_back(0)
    assert (servers.take(), servers.version()) == (True, 0)


def test_whoever_asks_second_waits_until_the_first_gives_back(folder: Path) -> None:
    learner, servers = LearnerLock(folder, 0), ServersLock(folder, 1)
    assert servers.version() == 0
    assert servers.take()
    assert not servers.is_wanted()
    learner.ask()
    assert servers.is_wanted()
    assert not learner.is_ours()
    servers.give_back()
    assert learner.is_ours()
    assert not servers.take()
    learner.give_back(7)
    assert servers.take()
    assert servers.version() == 7


def test_servers_wait_for_every_rank_and_the_learner_for_every_actor(folder: Path) -> None:
    ranks = [LearnerLock(folder, rank) for rank in range(2)]
    actors = [ServersLock(folder, 2) for _ in range(2)]
    assert all(actor.take() for actor in actors)
    for rank in ranks:
        rank.ask()
    for actor in actors:
        assert not ranks[0].is_ours()
        actor.give_back()
    assert ranks[0].is_ours()
    for rank in ranks:
        assert not actors[0].take()
        rank.give_back(1)
    assert actors[0].take()


@pytest.mark.slow
def test_they_never_have_the_gpus_at_the_same_time(folder: Path) -> None:
    learner_has, actors_have, wrong, over = [0], [0, 0], [], threading.Event()

    def act(index: int) -> None:
        lock, rng = ServersLock(folder, 1), random.Random(index)
        while not over.is_set():
            if lock.take():
                actors_have[index] = 1
                wrong.extend(learner_has if learner_has[0] else ())
                while not lock.is_wanted() and not over.is_set():
                    time.sleep(rng.random() * 1e-4)
                actors_have[index] = 0
                lock.give_back()

    threads = [threading.Thread(target=act, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    lock, taken = LearnerLock(folder, 0), 0
    for version in range(200):
        lock.ask()
        until(lock.is_ours)
        learner_has[0] = 1
        wrong.extend(each for each in actors_have if each)
        learner_has[0] = 0
        lock.give_back(version)
        taken += 1
        time.sleep(1e-4)
    over.set()
    for thread in threads:
        thread.join()
    assert taken == 200
    assert wrong == []


@pytest.mark.slow
def test_a_learner_that_is_killed_has_them_no_more(folder: Path) -> None:
    code = f"{HOLD}lock = LearnerLock(Path(sys.argv[1]), 0); lock.ask(); print(flush=True); time.sleep(600)"
    learner = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    assert learner.stdout is not None
    learner.stdout.readline()
    servers = ServersLock(folder, 1)
    assert not servers.take()
    learner.kill()
    learner.wait()
    learner.stdout.close()
    assert servers.take()


@pytest.mark.slow
def test_an_actor_that_is_killed_has_them_as_long_as_its_servers_live(folder: Path) -> None:
    code = f"""{HOLD}
import subprocess
lock = ServersLock(Path(sys.argv[1]), 1)
assert lock.take()
server = subprocess.Popen(["sleep", "600"], pass_fds=[lock.file])
print(server.pid, flush=True)
time.sleep(600)
"""
    actor = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    assert actor.stdout is not None
    server = int(actor.stdout.readline())
    actor.kill()
    actor.wait()
    actor.stdout.close()
    learner = LearnerLock(folder, 0)
    learner.ask()
    assert not learner.is_ours()
    os.kill(server, signal.SIGKILL)
    until(learner.is_ours)


SERVER = """
import subprocess, sys, time
worker = "memory = bytearray(256 << 20); memory[::4096] = bytes(len(memory) // 4096); "
worker += "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", worker])
time.sleep(600)
"""
"""A server whose worker has much memory, which takes a while to free, and inherits no file."""


@pytest.mark.slow
def test_an_actor_that_is_killed_has_them_until_the_last_process_of_its_server_has_ended(folder: Path) -> None:
    log = folder / "server.log"
    code = f"""{HOLD}
from asyncrl.machine.child import start_guarded
lock = ServersLock(Path(sys.argv[1]), 1)
assert lock.take()
server = start_guarded([sys.executable, "-c", {SERVER!r}], Path(sys.argv[2]), {{}}, [lock.file])
print(server.pid, flush=True)
time.sleep(600)
"""
    actor = subprocess.Popen([sys.executable, "-c", code, str(folder), str(log)], stdout=subprocess.PIPE)
    assert actor.stdout is not None
    server = int(actor.stdout.readline())
    worker = int(until(lambda: whole_lines(log)))
    learner = LearnerLock(folder, 0)
    learner.ask()
    actor.kill()
    actor.wait()
    actor.stdout.close()
    while not learner.is_ours():
        pass
    assert has_ended(worker)
    assert has_ended(server)
