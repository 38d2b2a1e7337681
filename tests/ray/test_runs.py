"""Whole runs on a Ray cluster of four nodes: they learn as they do on one machine, and survive the loss of any node."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from asyncrl.commands.demo.prepare import CACHE, SEED, prepare_demo, prepared_overrides
from asyncrl.machine.ports import free_ports
from asyncrl.replay.stored import StoredRun
from tests.chaos.rule import WITNESS_VARIABLE
from tests.chaos.verdict import judge
from tests.chaos.witness import Witness
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, Run
from tests.helpers import GENEROUS_S, until
from tests.ray.support import Nodes, hosts, on_ray

pytestmark = pytest.mark.timeout(1200)


def scale(run: Run, *counts: str) -> None:
    subprocess.run([sys.executable, "-m", "asyncrl", "scale", str(run.dir), *counts], check=True, cwd=ROOT)


def test_the_demo_learns_on_four_nodes_and_its_actors_come_and_go(nodes: Nodes, tmp_path: Path) -> None:
    demo = prepared_overrides(prepare_demo(ROOT / CACHE, SEED, lambda _: None))
    more = ("learner.steps=12", "learner.eval_every=12", "cluster.actors=1", "cluster.scorers=1")
    with Run("train", tmp_path, *demo, *on_ray(nodes), *more) as run:
        run.wait_for_step(1)
        where = hosts(run)
        assert where.keys() == {"replay", "learner", "actor-0", "scoring-0"}
        assert where["replay"] == nodes.disk
        assert len({where["replay"], where["learner"], where["actor-0"]}) == 3
        scale(run, "actors=2")
        until(lambda: "actor-1" in hosts(run))
        scale(run, "actors=1")
        until(lambda: "actor-1" not in hosts(run))
        run.finish()
    assert run.accuracies()[-1] >= 0.9, run.accuracies()
    assert {path.stem for path in (run.dir / "logs").glob("*.log")} >= {"replay", "learner", "actor-0", "actor-1"}
    with closing(StoredRun(run.dir / "replay")) as stored:
        audit = stored.audit(uses=1)
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)


def lose(nodes: Nodes, run: Run, role: str, back: bool) -> None:
    """Kill the node of a role; the run goes on once the role is elsewhere, or its node is back."""
    before = hosts(run)[role]
    nodes.kill(before)
    step = run.newest_step()
    until(lambda: hosts(run).get(role) != before)
    if back:
        nodes.add(before)
    run.wait_for_step(step + 2)
    if not back:
        nodes.add(before)


def test_nodes_die_and_nothing_is_lost_or_trained_twice(nodes: Nodes, tmp_path: Path) -> None:
    world, seen, port, rng = World.make(tmp_path), tmp_path / "judged", free_ports(1), random.Random(0)
    small = ["cluster.actors=1", "cluster.scorers=1", f"network.replay_port={port}", "cluster.learner_ranks=1"]
    environment = f"cluster.ray.runtime_env={{env_vars: {{{WITNESS_VARIABLE}: '{seen}'}}}}"
    overrides = [*world.overrides(1), *small, *on_ray(nodes), environment]
    victims: Sequence[str] = ["actor-0", "learner", "replay"]
    with ExitStack() as stack:
        run = stack.enter_context(Run("train", tmp_path, *overrides, "learner.steps=1000000"))
        witness = stack.enter_context(closing(Witness(f"tcp://{nodes.disk}:{port}", "witness", "0")))
        run.wait_for_step(2)
        for victim in rng.sample(victims, len(victims)):
            lose(nodes, run, victim, back=victim == "replay")
        run.process.send_signal(signal.SIGINT)
        run.process.wait(GENEROUS_S)
        with closing(StoredRun(run.dir / "replay")) as stored:
            steps = stored.steps() + 2
        resumed = stack.enter_context(Run("train", tmp_path, *overrides, f"learner.steps={steps}"))
        resumed.finish()
    again = tmp_path / "again"
    again.mkdir()
    source = [f"replay.source={run.dir / 'replay'}", f"learner.steps={steps}", "learner.checkpoint_every=1000000"]
    with Run("learner", again, *world.overrides(1), *small, *source) as uninterrupted:
        uninterrupted.finish()
    verdict = judge(run, uninterrupted.dir, [witness], set(seen.read_text().split()))
    assert verdict["broken"] == [], verdict
    assert verdict["trained"] == steps * 8
