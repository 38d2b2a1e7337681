"""The parts for Ray clusters that need no cluster: a role as a child process, the end of the process of a killed Ray
actor, and the errors if Ray is missing."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.config.schema import ClusterConfig
from asyncrl.config.schema.cluster import RayConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.ray.cluster import RayCluster
from asyncrl.launch.ray.role import HostedRole
from asyncrl.launch.survivors import starting_alone
from asyncrl.machine.activity import VARIABLE
from tests.helpers import until

SAVES = """
import pathlib, signal, time
folder = pathlib.Path({folder!r})
asked = []
def note(what):
    with (folder / "events").open("a") as file: file.write(what + "\\n")
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
note("begins")
while not asked: time.sleep(0.01)
note("is asked to end")
while not (folder / "looked").exists(): time.sleep(0.01)
note("ends")
"""
ACTOR = """
import time
from asyncrl.launch.ray.role import HostedRole
HostedRole({folder!r}).start(["python", "-c", {code!r}], "log", {environment!r}, None)
time.sleep(600)
"""


def hosted(folder: Path, code: str) -> HostedRole:
    role = HostedRole(str(folder / "not on this machine"))
    environment = {"MARK": "yes", VARIABLE: str(folder / "alive" / "learner")}
    role.start(["another-python", "-c", code], str(folder / "log"), environment, ["2", "5"])
    return role


def events(folder: Path) -> list[str]:
    file = folder / "events"
    return file.read_text().splitlines() if file.exists() else []


@contextmanager
def showing_that_it_waits(folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Makes the file `looked` once the block waits for a role, or has started a second one."""

    def show() -> None:
        until(lambda: "waiting up to" in caplog.text or events(folder).count("begins") == 2)
        (folder / "looked").touch()

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_hosted_role_runs_with_this_machines_python_and_the_gpus_that_it_got(tmp_path: Path) -> None:
    role = hosted(
        tmp_path, "import os, sys; print(os.environ['MARK'], os.environ['CUDA_VISIBLE_DEVICES']); sys.exit(7)"
    )
    until(lambda: role.poll().status is not None)
    assert role.poll().status == 7
    assert (tmp_path / "log").read_text() == "yes 2,5\n"


@pytest.mark.parametrize(("end", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
def test_a_hosted_role_can_be_ended(tmp_path: Path, end: str, number: signal.Signals) -> None:
    role = hosted(tmp_path, "import time; time.sleep(600)")
    assert role.poll().status is None
    getattr(role, end)()
    assert until(lambda: role.poll().status) == -number


@pytest.mark.slow
def test_a_role_whose_actor_was_killed_starts_again_once_its_first_process_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beats, code = tmp_path / "alive" / "learner", SAVES.format(folder=str(tmp_path))
    beats.parent.mkdir()
    beats.write_text("the checkpoint step-000001")
    actor = ACTOR.format(folder=str(tmp_path), code=code, environment={VARIABLE: str(beats)})
    with subprocess.Popen([sys.executable, "-c", actor]) as first:
        until(lambda: events(tmp_path) == ["begins"])
        first.kill()
    until(lambda: "is asked to end" in events(tmp_path))
    with showing_that_it_waits(tmp_path, caplog):
        role = hosted(tmp_path, code)
    until(lambda: events(tmp_path).count("begins") == 2)
    assert events(tmp_path) == ["begins", "is asked to end", "ends", "begins"]
    role.kill()


def test_only_one_actor_at_a_time_starts_a_role(tmp_path: Path) -> None:
    beats = tmp_path / "alive" / "learner"
    with starting_alone(beats), beats.with_name("learner.start").open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with starting_alone(beats):
        assert not beats.exists(), "a later start finds the lock free"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[ray\]'"):
        RayCluster(ClusterConfig())


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:1", "no Ray cluster is there"), ("ray://head:10001", "`ray job submit`")]
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, reason: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=reason):
        RayCluster(ClusterConfig(ray=RayConfig(address=address)))


def test_a_node_that_starts_too_slowly_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="timed out during startup"):
        RayCluster(ClusterConfig())
