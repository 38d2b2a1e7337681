"""A whole run on two hosts, started from one command line: two network namespaces, joined by a virtual cable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.network.keys import make_keys
from asyncrl.replay.stored import StoredRun
from tests.chaos.world import World
from tests.end_to_end.support import ADDRESSES, DELAY_S, DEVICE, ROOT, Run
from tests.helpers import until

pytestmark = pytest.mark.long

STEPS = 80
PARTITION_S = 30.0
NOBODY = "02:00:00:00:00:99"
ROUND_TRIP = """
import contextlib, socket, sys, time
began = time.monotonic()
with contextlib.suppress(ConnectionRefusedError):
    socket.create_connection((sys.argv[1], 9), 60)
print(time.monotonic() - began)
"""


def on_hosts(namespaces: Sequence[str]) -> list[str]:
    return [
        *("cluster.launcher=hosts", f"cluster.hosts=[{','.join(namespaces)}]"),
        "cluster.shell=[ip,netns,exec,'{host}',sh,-c]",
        *(f"network.replay_host={ADDRESSES[0]}", f"network.learner_host={ADDRESSES[0]}"),
    ]


def connect(namespaces: Sequence[str], connected: bool) -> None:
    """Join the hosts again, or have each send its packets to a card that does not exist: neither hears of the loss."""
    for name, other in zip(namespaces, reversed(ADDRESSES), strict=True):
        change = ["del", other] if connected else ["replace", other, "lladdr", NOBODY, "nud", "permanent"]
        subprocess.run(["ip", "-n", name, "neigh", *change, "dev", DEVICE], check=True)


def round_trip_s(namespace: str, address: str) -> float:
    """Return the time in which a host hears from the other that no process listens at a port."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", ROUND_TRIP, address]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def scale(run: Run, actors: int) -> None:
    subprocess.run([sys.executable, "-m", "asyncrl", "scale", str(run.dir), f"actors={actors}"], cwd=ROOT, check=True)


def roles(run: Run) -> set[str]:
    """Return the roles whose processes are known."""
    told = json.loads((run.dir / "processes.json").read_text())
    return {name for name, role in told.items() if role["pid"]}


def look(namespace: str, run: Path, keys: Path) -> subprocess.CompletedProcess[str]:
    """Ask the replay from a host for its status."""
    command = [sys.executable, "-m", "asyncrl", "inspect", "status", str(run), "--keys", str(keys)]
    return subprocess.run(["ip", "netns", "exec", namespace, *command], cwd=ROOT, capture_output=True, text=True)


def test_a_run_over_far_hosts_has_keys_and_outlives_a_partition_and_a_role_that_dies_far_away(
    far_namespaces: list[str], start: Callable[..., Run], tmp_path: Path
) -> None:
    namespaces, world = far_namespaces, World.make(tmp_path)
    assert round_trip_s(namespaces[0], ADDRESSES[1]) >= 2 * DELAY_S
    run = start(
        "train",
        *world.overrides(1),
        *("cluster.learner_ranks=1", "cluster.actors=1", "cluster.scorers=1", f"learner.steps={STEPS}"),
        *("cluster.drain_s=60", *on_hosts(namespaces)),
    )
    run.wait_for_step(3)
    where = json.loads((run.dir / "processes.json").read_text())
    assert {name: role["host"] for name, role in where.items()} == {
        **{"replay": namespaces[0], "learner": namespaces[0]},
        **{"scoring-0": namespaces[1], "actor-0": namespaces[1]},
    }
    connect(namespaces, False)
    time.sleep(PARTITION_S)
    before = run.newest_step()
    connect(namespaces, True)
    run.wait_for_step(before + 5)
    os.kill(where["actor-0"]["pid"], signal.SIGKILL)
    until(lambda: json.loads((run.dir / "processes.json").read_text())["actor-0"]["restarts"] == 1)
    run.wait_for_step(run.newest_step() + 5)
    scale(run, 2)
    until(lambda: "actor-1" in roles(run))
    run.wait_for_step(run.newest_step() + 5)
    scale(run, 1)
    until(lambda: "actor-1" not in roles(run))
    assert "all running episodes were delivered" in (run.dir / "logs" / "actor-1.log").read_text()
    make_keys(tmp_path / "wrong")
    assert "`allowed`" not in look(namespaces[1], run.dir, run.dir / "keys").stderr
    assert "`allowed`" in look(namespaces[1], run.dir, tmp_path / "wrong").stderr
    assert "a client was refused" in (run.dir / "logs" / "replay.log").read_text()
    run.finish()
    assert run.newest_step() == STEPS - 1
    with closing(StoredRun(run.dir / "replay")) as stored:
        audit = stored.audit(uses=1)
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)


def test_a_learner_has_ranks_on_every_host_of_its_pool(
    namespaces: list[str], start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(
        "train",
        *World.make(tmp_path).overrides(1),
        *("cluster.learner_ranks=1", "cluster.actors=2", "cluster.scorers=1", "learner.steps=8"),
        *("cluster.pools={all: {nodes: 2}}", "network.insecure=true", *on_hosts(namespaces)),
    )
    run.finish()
    where = {name: role["host"] for name, role in json.loads((run.dir / "processes.json").read_text()).items()}
    assert (where["learner"], where["learner-node-1"]) == (where["actor-0"], where["actor-1"]) == tuple(namespaces)
    assert "rank 1 of 2" in (run.dir / "logs" / "learner-node-1.log").read_text()
    assert "ended with status" not in run.output
    assert (run.dir / "keys" / "server.secret").exists(), "replay and weights have keys also where the ranks have none"
