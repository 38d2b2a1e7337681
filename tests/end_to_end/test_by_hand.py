"""Roles that a person starts end with the run; what it learnt is exported and evaluated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.data.writing import write_tasks
from asyncrl.machine.ports import free_ports
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.runs.from_config import read_config
from tests.chaos.world import World
from tests.end_to_end.support import ROOT
from tests.helpers import GENEROUS_S, make_task
from tests.learner.ranks.test_ranks import contents

pytestmark = pytest.mark.long

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != WORKER_VARIABLE}


def asyncrl(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncrl", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process: subprocess.Popen[str], status: int = 0) -> str:
    out, error = process.communicate(timeout=GENEROUS_S)
    assert process.returncode == status, out + error
    return out + error if status else out


def test_roles_started_by_hand_end_when_the_run_is_done_and_a_checkpoint_is_exported_and_evaluated(
    tmp_path: Path,
) -> None:
    world, port = World.make(tmp_path), free_ports(2)
    ports = (f"network.replay_port={port}", f"network.weights_port={port + 1}")
    words = [
        *world.overrides(1),
        "cluster.learner_ranks=1",
        "learner.checkpoint_every=1",
        f"run.dir={tmp_path}",
        *ports,
    ]
    for steps in (1, 2):
        roles = [asyncrl(role, *words, f"learner.steps={steps}") for role in ("replay", "scoring", "actor", "learner")]
        for role in roles:
            output(role)
    run = tmp_path / "train"
    assert read_config(run).learner.steps == 2, "it is the configuration of the last start"
    exported = Path(output(asyncrl("export", run)).strip())
    assert contents(exported) == contents(run / "model")

    tasks = tmp_path / "held_out.parquet"
    write_tasks(tasks, (make_task(index, data_source=f"source-{index % 2}") for index in range(4)))
    evaluate = ("evaluate", run, "--data", tasks, "--step", 1, "--n", 2, "--json")
    assert "guess" in output(asyncrl(*evaluate, "scoring.rule=guess"), status=2)
    result = json.loads(output(asyncrl(*evaluate)))
    assert (result["step"], result["total"]["tasks"], result["temperature"]) == (1, 4, 1.0)
    assert result["total"]["scored"] + result["total"]["failed"] == 8
    for estimate in ("pass_at", "best_at", "maj_at"):
        assert set(result["total"][estimate]) == {"1", "2"}
    assert result["total"]["mean_length"] > 0
    assert set(result["sources"]) == {"source-0", "source-1"}
    assert json.loads(output(asyncrl(*evaluate))) == result, "the result of a finished evaluation is read"
    folder = run / "evaluations" / "step-000001-held_out-n2"
    printed = output(asyncrl(*evaluate[:-1], "--samples", 1))
    assert "maj@k" in printed
    samples = [line for line in printed.splitlines() if line.startswith("[sample] ")]
    assert [line.split()[3] for line in samples] == ["source-0,", "source-1,"]
    logged = "".join(file.read_text() for file in (folder / "logs").glob("scoring*"))
    assert logged.count("[sample] ") == 2
    assert "e0-000000.0.0" in output(asyncrl("inspect", "show", "e0-000000.0.0", "--run", folder))
