"""`ray job submit`: the command line of a run as a job of a cluster, and its logs and its end as the job's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.world import World
from tests.end_to_end.support import ROOT
from tests.ray.support import DISK, POOLS, Nodes

pytestmark = pytest.mark.timeout(1200)


def test_a_run_is_submitted_as_a_job_and_ends_with_it(nodes: Nodes, tmp_path: Path) -> None:
    words = [
        *World.make(tmp_path).overrides(1),
        *(
            "cluster.launcher=ray",
            f"cluster.ray.replay_resource={DISK}",
            *POOLS,
            "learner.steps=2",
            "cluster.learner_ranks=1",
            "cluster.actors=1",
        ),
        *(f"run.dir={tmp_path}", "run.name=run", "network.replay_port=0", "network.weights_port=0"),
    ]
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--address={nodes.dashboard}"]
    environment = ["--runtime-env-json", json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})]
    command = [*submit, *environment, "--", sys.executable, "-m", "asyncrl", "train", *words]
    job = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "done after 2 of 2 steps" in job.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert json.loads((tmp_path / "run" / "processes.json").read_text())["learner"]["host"]
