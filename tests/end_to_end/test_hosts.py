"""A whole run whose learner has two hosts: two network namespaces, joined by a virtual cable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.network.keys import make_keys
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from tests.chaos.world import World
from tests.end_to_end.support import ADDRESSES, ROOT
from tests.helpers import GENEROUS_S, until

pytestmark = pytest.mark.long

STEPS = 60


def worker(root: subprocess.Popen[bytes], name: str) -> int | None:
    """The process id of a worker that `root` has started, or one of its workers."""
    for each in psutil.Process(root.pid).children(recursive=True):
        try:
            if each.environ().get(WORKER_VARIABLE) == name:
                return int(each.pid)
        except psutil.NoSuchProcess:
            continue
    return None


def test_a_run_over_two_hosts_goes_on_after_a_rank_hangs_and_after_a_host_loses_its_launcher(
    namespaces: list[str], tmp_path: Path
) -> None:
    world = World.make(tmp_path)
    make_keys(tmp_path / "keys")
    words = [
        *world.overrides(1),
        *("cluster.learner_ranks=1", "cluster.actors=1", "cluster.scorers=1", f"learner.steps={STEPS}"),
        *("learner.nodes=2", "learner.rank_timeout_s=10", f"learner.rendezvous={ADDRESSES[0]}:5757"),
        *(f"network.host={ADDRESSES[0]}", f"network.keys={tmp_path / 'keys'}", "network.insecure=true"),
        *(f"run.dir={tmp_path}", "run.name=run"),
    ]
    run = tmp_path / "run"

    def newest_step() -> int:
        return max((line["step"] for line in read_lines(metrics_file(run, "learner"))), default=-1)

    with ExitStack() as stack:
        hosts = []
        for node, name in enumerate(namespaces):
            output = stack.enter_context((tmp_path / f"output-{node}").open("wb"))
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "asyncrl", "train", *words]
            host = subprocess.Popen([*command, f"learner.node={node}"], cwd=ROOT, stdout=output, stderr=output)
            hosts.append(stack.enter_context(host))
            stack.callback(host.terminate)
        until(lambda: newest_step() >= 5)
        os.kill(worker(hosts[1], "learner-1") or 0, signal.SIGSTOP)
        until(lambda: "rank 1 of 2 has not run for" in (run / "host-1" / "logs" / "learner.log").read_text())
        until(lambda: newest_step() >= 20)
        os.kill(worker(hosts[1], "learner") or 0, signal.SIGKILL)
        assert [host.wait(GENEROUS_S) for host in hosts] == [0, 0]
    summary = json.loads((run / "summary.json").read_text())
    assert (run / "model" / "model.safetensors").exists(), summary
    assert newest_step() == STEPS - 1
    log = (run / "logs" / "learner.log").read_text()
    assert "host 1: rank 1 of 2 has not run for" in log
    assert "host 1 began anew" in log or "host 1 has not been heard of" in log
