"""Processes on a Ray cluster of one node see the GPUs that they see by every other launcher."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.placement.placement import place, settle
from asyncrl.launch.processes import role_environment
from asyncrl.launch.ray.launcher import RayLauncher
from tests.helpers import until
from tests.launch.gpus_of_one_host import SEEN, make_config, seen, telling


@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpus", SEEN)
def test_the_processes_of_one_host_see_the_gpus_of_the_table(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = make_config(str(tmp_path), gpus, "ray")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    with closing(RayLauncher(config.cluster, RunAddresses.of(config), lambda: None)) as launcher:
        placement = place(config, launcher.hosts())
        settle(config.cluster, config.learner, placement)
        launcher.prepare(placement, threading.Event())
        logs = {role.name: tmp_path / "run" / "logs" / f"{role.name}.log" for role in placement.roles}
        started = [
            launcher.start(telling(role.name), logs[role.name], role_environment(role)) for role in placement.roles
        ]
        until(lambda: all(each.poll() is not None for each in started))
        found = {name: seen(log.read_text()) for name, log in logs.items()}
    assert found == SEEN[gpus]
