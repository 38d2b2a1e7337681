"""Commands that run a run on Ray: another takes over from one that was killed, two share a cluster, one grows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.replay.stored import StoredRun
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, Run
from tests.helpers import GENEROUS_S, until
from tests.ray.support import Nodes, hosts, on_ray

pytestmark = pytest.mark.timeout(1200)

SHARED_S = 2 * GENEROUS_S
"""The limit for two runs that begin at once on the same cores."""
SMALL = ("cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1")


def audit(run: Run) -> tuple[int, int]:
    with closing(StoredRun(run.dir / "replay")) as stored:
        found = stored.audit(uses=1)
    return found["lost"], found["trained_twice"]


def roles_of(run: Run) -> dict[str, psutil.Process]:
    """The processes of a run's roles, which are all on this machine."""
    told = json.loads((run.dir / "processes.json").read_text())
    return {name: psutil.Process(role["pid"]) for name, role in told.items() if role["pid"]}


def test_a_killed_command_leaves_nothing_behind_and_another_terminal_takes_its_run_over(
    nodes: Nodes, tmp_path: Path
) -> None:
    steps = 14
    words = [*World.make(tmp_path).overrides(1), *SMALL, *on_ray(nodes), f"learner.steps={steps}"]
    with Run("train", tmp_path, *words) as run:
        run.wait_for_step(3)
        roles = roles_of(run)
        assert len(roles) == 4
        run.process.kill()
        # No wait is needed: what is left ends by itself, or is ended by the next start.
        resume = [sys.executable, "-m", "asyncrl", "resume", str(run.dir)]
        resumed = subprocess.run(resume, cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS_S * 2)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert not any(each.is_running() for each in roles.values())
    assert [line["step"] for line in run.steps()][-1] == steps - 1
    assert audit(run) == (0, 0)


def test_two_runs_share_a_cluster_and_the_stop_of_one_drains_its_episodes_and_leaves_the_other_alone(
    nodes: Nodes, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        runs = []
        for name in ("one", "other"):
            folder = tmp_path / name
            folder.mkdir()
            words = [*World.make(folder).overrides(1), *SMALL, *on_ray(nodes), "cluster.drain_s=60"]
            runs.append(stack.enter_context(Run("train", folder, *words, "learner.steps=100000")))
        one, other = runs
        for run in runs:
            run.wait_for_step(2, SHARED_S)
        assert hosts(one)["replay"] == hosts(other)["replay"] == nodes.disk
        assert not {each.pid for each in roles_of(one).values()} & {each.pid for each in roles_of(other).values()}
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(SHARED_S) == 130
        assert "all running episodes were delivered" in (one.dir / "logs" / "actor-0.log").read_text()
        other.wait_for_step(other.newest_step() + 3)
        assert "restarted" not in other.output
        other.process.send_signal(signal.SIGINT)
        other.process.wait(GENEROUS_S)
        assert audit(one) == audit(other) == (0, 0)


def test_a_cluster_of_the_runs_own_grows_by_itself_and_outlives_a_ctrl_c_until_the_run_has_stopped(
    tmp_path: Path,
) -> None:
    world = World.make(tmp_path).overrides(1)
    words = [*world, *SMALL, "cluster.launcher=ray", "cluster.cpus=4", "learner.steps=100000"]
    grows = ["cluster.autoscale={actors: [1, 2], every_s: 1, patience: 2}", "cluster.drain_s=30"]
    with Run("train", tmp_path, *words, *grows) as run:
        until(lambda: "cluster.autoscale: actors=2, since the learner waits for" in run.output)
        until(lambda: "actor-1" in hosts(run))
        roles = roles_of(run)
        for each in (psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)):
            if each.pid not in {role.pid for role in roles.values()}:
                with suppress(psutil.NoSuchProcess):  # One of Ray may end meanwhile.
                    each.send_signal(signal.SIGINT)  # As a terminal does.
        assert run.process.wait(GENEROUS_S) == 130, run.output
        assert "all running episodes were delivered" in (run.dir / "logs" / "actor-0.log").read_text()
        until(lambda: not any(each.is_running() for each in roles.values()))
    assert audit(run) == (0, 0)
