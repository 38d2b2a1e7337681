"""The processes of one host see the same GPUs with every launcher. The tests with Ray are in tests/ray."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import asyncrl
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.launcher import Launcher, LocalLauncher
from asyncrl.launch.placement.placement import place, settle
from asyncrl.launch.processes import role_environment
from asyncrl.launch.slurm.commands import SlurmJob, SlurmNode
from asyncrl.launch.slurm.launcher import SlurmLauncher
from asyncrl.launch.slurm.step import NodeReport
from tests.helpers import until
from tests.launch.gpus_of_one_host import SEEN, make_config, seen, telling
from tests.launch.stub_slurm import write_programs


def visible(gpus: int) -> list[str]:
    """Return GPUs as a launcher or Slurm makes them visible: by names that do not tell their positions."""
    return [f"GPU-{chr(ord('a') + number)}" for number in range(gpus)]


@pytest.mark.slow
@pytest.mark.parametrize("limited", [False, True], ids=["all", "limited"])
@pytest.mark.parametrize("gpus", SEEN)
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_the_processes_of_one_host_see_the_gpus_of_the_table(
    kind: str, gpus: int, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if limited:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible(gpus)))
    config = make_config(str(tmp_path), gpus, kind)
    launcher: Launcher = LocalLauncher(config.cluster, RunAddresses.of(config))
    if kind == "slurm":
        monkeypatch.setenv("PATH", f"{write_programs(tmp_path / 'bin')}:{os.environ['PATH']}")
        report = NodeReport("a", gpus, 16, "127.0.0.1", 20000, True, asyncrl.__version__)
        launcher = SlurmLauncher(
            config.cluster, RunAddresses.of(config), SlurmJob("7", (SlurmNode("a", "a"),)), [report]
        )
    placement = place(config, launcher.hosts())
    settle(config.cluster, config.learner, placement)
    launcher.set_placement(placement)
    logs = tmp_path / "logs"
    logs.mkdir()
    started = []
    for role in placement.roles:
        command = replace(telling(role.name), environment=role_environment(role))
        started.append(launcher.start(command, logs / f"{role.name}.log", command.environment))
    until(lambda: all(each.poll() is not None for each in started))
    found = {role.name: seen((logs / f"{role.name}.log").read_text()) for role in placement.roles}
    names = visible(gpus) if limited else [str(number) for number in range(gpus)]
    expected = {
        role: ",".join(names[int(number)] for number in numbers.split(",") if number)
        for role, numbers in SEEN[gpus].items()
    }
    assert found == expected
