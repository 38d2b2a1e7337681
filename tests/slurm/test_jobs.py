"""Whole runs as jobs of a real Slurm: a role dies, the time ends, a node is lost, the job is cancelled."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.commands.demo.summary import audit
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, read_config
from tests.helpers import GENEROUS_S, until
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.long

LAUNCH = ROOT / "launchers" / "slurm_launch.sh"
END_S = 600


class SlurmRun:
    """A run that a job has in `folder`/run."""

    def __init__(self, cluster: SlurmCluster, folder: Path, options: list[str], *words: str) -> None:
        self.dir = folder / "run"
        self._cluster, self._output = cluster, folder / "job.out"
        world = World.make(folder)
        self.words = [
            *world.overrides(1),
            *(f"run.dir={folder}", "run.name=run", "cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1"),
            *words,
        ]
        submitted = cluster.run(
            "sbatch", "--parsable", f"--output={self._output}", f"--chdir={ROOT}", *options, str(LAUNCH), *self.words
        )
        self.job = submitted.split(";")[0]

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def of_job(self, name: str) -> str:
        """Return the value of a field of the job in Slurm."""
        found = re.search(rf"\b{name}=(\S+)", self._cluster.run("scontrol", "show", "job", self.job))
        return found[1] if found else ""

    def steps(self) -> list[int]:
        return [line["step"] for line in read_lines(metrics_file(self.dir, "learner")) if "reward/mean" in line]

    def newest_step(self) -> int:
        return max(self.steps(), default=-1)

    def checkpoints(self) -> list[int]:
        return sorted(int(mark.parent.name[5:]) for mark in (self.dir / "checkpoints").glob("step-*/complete"))

    def until(self, condition: Callable[[], Any], seconds: float = GENEROUS_S) -> Any:
        """Wait as `until` does. A failure has the output of the job."""
        try:
            return until(condition, seconds)
        except AssertionError:
            raise AssertionError(self.output) from None

    def processes(self) -> dict[str, psutil.Process]:
        """Each role's own process, not its srun."""
        found: dict[str, psutil.Process] = {}
        for each in psutil.process_iter(["environ", "cmdline"]):
            environment, words = each.info["environ"] or {}, each.info["cmdline"] or []
            if environment.get("SLURM_JOB_ID") == self.job and "SLURMD_NODENAME" in environment and "srun" not in words:
                found.setdefault(environment.get(WORKER_VARIABLE, ""), each)
        return found

    def node_of(self, role: str) -> str:
        return str(self.processes()[role].environ()["SLURMD_NODENAME"])


def test_a_run_over_two_nodes_goes_on_after_a_death_and_after_the_end_of_its_time_until_it_is_cancelled(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run = SlurmRun(
        cluster,
        tmp_path,
        ["--nodes=2", "--exclusive", "--time=2", "--signal=B:USR1@45"],
        *("learner.steps=100000", "learner.checkpoint_every=100000"),
    )
    run.until(lambda: run.newest_step() >= 2)
    nodes = {role: run.node_of(role) for role in ("replay", "actor-0", "learner")}
    assert nodes["replay"] == nodes["learner"] != nodes["actor-0"]
    assert {stat.S_IMODE((run.dir / "keys").stat().st_mode)} == {0o700}
    os.kill(run.processes()["actor-0"].pid, signal.SIGKILL)
    run.until(lambda: "actor-0 was killed by SIGKILL" in run.output)
    run.until(lambda: run.of_job("Restarts") == "1", END_S)
    kept = run.checkpoints()[-1]
    assert kept == run.newest_step() + 1, "the learner saved every step before its job was requeued"
    assert "the job's time is nearly over" in run.output
    run.until(lambda: run.newest_step() >= kept + 1, END_S)
    assert (steps := run.steps()) == list(range(len(steps))), "no step was trained twice"
    logs = run.dir / "logs"
    # On a busy machine the time of the second attempt may be over before its first step.
    newest = f"attempt-{len(list(logs.glob('attempt-*')))}"
    assert newest != "attempt-1"
    assert (logs / "latest").readlink() == Path(newest)
    assert {path.name for path in (logs / "attempt-1").iterdir()} == {path.name for path in logs.glob("*.log")}
    assert (logs / "learner.log").samefile(logs / newest / "learner.log")
    cluster.run("scancel", run.job)
    run.until(lambda: run.of_job("JobState") == "CANCELLED" and not run.processes())
    assert run.checkpoints()[-1] > kept, "a cancelled job saves what it has trained, too"
    assert audit(run.dir, read_config(run.dir).replay.sampler.max_times_sampled) == {"lost": 0, "trained_twice": 0}


def test_a_job_that_loses_a_node_is_requeued_on_others_and_its_run_ends_well(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    steps = 14
    run = SlurmRun(cluster, tmp_path, ["--nodes=2", "--exclusive", "--time=30"], f"learner.steps={steps}")
    run.until(lambda: run.newest_step() >= 3)
    lost = run.node_of("actor-0")
    cluster.kill_node(lost)
    try:
        run.until(lambda: run.of_job("Restarts") == "1" and run.of_job("JobState") == "RUNNING", END_S)
        assert lost not in cluster.run("scontrol", "show", "hostnames", run.of_job("NodeList")).split()
        run.until(lambda: run.of_job("JobState") == "COMPLETED", END_S)
    finally:
        cluster.heal_node(lost)
    assert "result             done" in run.output
    assert set(run.steps()) == set(range(steps))
    assert (run.dir / "model" / "model.safetensors").exists()
    assert audit(run.dir, read_config(run.dir).replay.sampler.max_times_sampled) == {"lost": 0, "trained_twice": 0}


def test_the_nodes_of_a_job_are_a_ray_cluster_that_has_the_run_and_ends_with_the_job(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    steps = 8
    run = SlurmRun(
        cluster, tmp_path, ["--nodes=2", "--exclusive", "--time=30"], f"learner.steps={steps}", "cluster.launcher=ray"
    )
    run.until(lambda: run.newest_step() >= 2, END_S)
    nodes = {role: run.node_of(role) for role in ("replay", "actor-0", "learner")}
    assert nodes["replay"] == run.of_job("BatchHost")
    assert nodes["learner"] != nodes["actor-0"]
    run.until(lambda: run.of_job("JobState") == "COMPLETED", END_S)
    run.until(lambda: not run.processes())
    assert "result             done" in run.output
    assert sorted(run.steps()) == list(range(steps))
    assert {path.name for path in (run.dir / "logs").glob("ray-*.log")} == {
        "ray-head.log",
        *(f"ray-{node}.log" for node in set(nodes.values()) - {nodes["replay"]}),
    }
    assert audit(run.dir, read_config(run.dir).replay.sampler.max_times_sampled) == {"lost": 0, "trained_twice": 0}


def test_jobs_of_a_chain_resume_one_after_the_other_and_end_at_once_when_the_run_is_done(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    steps, output = 24, tmp_path / "job-%j.out"
    words = [*World.make(tmp_path).overrides(1), f"run.dir={tmp_path}", "run.name=run", f"learner.steps={steps}"]
    counts = ["cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1", "learner.checkpoint_every=100000"]
    options = ["--nodes=1", "--time=30", f"--output={output}", f"--chdir={ROOT}"]
    told = cluster.run(str(LAUNCH), "--chain", "3", *options, *words, *counts)
    jobs = told.partition(": ")[2].partition(";")[0].split()
    assert len(jobs) == 3

    def text(job: str) -> str:
        file = Path(str(output).replace("%j", job))
        return file.read_text() if file.exists() else ""

    def of_job(job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", cluster.run("scontrol", "show", "job", job))
        return found[1] if found else ""

    def trained() -> list[int]:
        return [line["step"] for line in read_lines(metrics_file(tmp_path / "run", "learner")) if "reward/mean" in line]

    until(lambda: max(trained(), default=-1) >= 2, END_S)
    # What Slurm sends shortly before the time ends.
    cluster.run("scancel", "--signal=USR1", "--batch", jobs[0])
    until(lambda: of_job(jobs[2], "JobState") in ("COMPLETED", "FAILED"), END_S)
    assert [of_job(job, "JobState") for job in jobs] == ["COMPLETED"] * 3, "\n".join(map(text, jobs))
    assert [of_job(job, "Restarts") for job in jobs] == ["0"] * 3
    assert "saving, and the next job of the chain resumes" in text(jobs[0])
    assert f"done after {steps} of {steps} steps" in text(jobs[1])
    assert "job 3 of 3 of the chain has nothing to do: the run is done" in text(jobs[2])
    assert trained() == list(range(steps)), "every step was trained once"
    assert audit(tmp_path / "run", read_config(tmp_path / "run").replay.sampler.max_times_sampled) == {
        "lost": 0,
        "trained_twice": 0,
    }


def test_a_role_sees_its_own_gpus_among_those_of_its_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    shown = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    words = [sys.executable, "-m", "asyncrl.launch.slurm.step", "role"]
    line = f"import subprocess; [subprocess.run(['srun', '--overlap', *{words!r}, gpus, {words[0]!r}, '-c', {shown!r}])"
    script = tmp_path / "job.py"
    script.write_text(f"#!{sys.executable}\n{line} for gpus in ('1', '0,1', '', 'all')]\n")
    options = ["--wait", "--gpus-per-node=2", f"--output={tmp_path}/out", f"--chdir={ROOT}"]
    first = ["--gpus-per-node=2", "--output=/dev/null", "--nodelist=n1", f"--wrap=sleep {END_S}"]
    holder = cluster.run("sbatch", "--parsable", *first)
    until(lambda: "RUNNING" in cluster.run("scontrol", "show", "job", holder))
    cluster.run("sbatch", *options, "--nodelist=n1", str(script))
    cluster.run("scancel", holder)
    # The other job has GPUs 0 and 1.
    assert [line for line in (tmp_path / "out").read_text().splitlines() if "srun" not in line] == [
        "3",
        "2,3",
        "",
        "2,3",
    ]


def test_tasks_of_an_array_are_runs_of_their_own_and_components_are_told_apart(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    world = World.make(tmp_path)
    words = [str(LAUNCH), "--dry-run", *world.overrides(1), f"run.dir={tmp_path}", "run.name=sweep"]
    cluster.run("sbatch", "--wait", "--array=3-4", f"--output={tmp_path}/seed-%a", f"--chdir={ROOT}", *words)
    for seed in (3, 4):
        text = (tmp_path / f"seed-{seed}").read_text()
        assert f"{tmp_path}/sweep-{seed}/config.yaml" in text
    parts = ["--nodes=1", ":", "--nodes=1"]
    cluster.run("sbatch", "--wait", f"--output={tmp_path}/parts", f"--chdir={ROOT}", *parts, *words)
    assert "--het-group=0" in (text := (tmp_path / "parts").read_text()), text
    assert "--het-group=1" in text
