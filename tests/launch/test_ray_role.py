"""The parts for Ray clusters that need no cluster: a role as a child process, and the errors if Ray is missing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from asyncrl.config.schema import ClusterConfig
from asyncrl.config.schema.cluster import RayConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.ray.cluster import RayCluster
from asyncrl.launch.ray.role import HostedRole
from tests.helpers import until


def hosted(folder: Path, code: str) -> HostedRole:
    role = HostedRole(str(folder / "not on this machine"))
    role.start(["another-python", "-c", code], str(folder / "log"), {"MARK": "yes"}, ["2", "5"])
    return role


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
