"""Whole runs whose learner and servers have the same GPUs in turns. On the CPU both have no GPU, and keep to the turns
all the same; the server is a fake one in a process of its own, which an actor starts as it does SGLang."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.commands.demo.summary import audit
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from tests.chaos.world import World
from tests.end_to_end.fake_server.sglang.launch_server import CRIME
from tests.end_to_end.support import ROOT, Run, read_config
from tests.helpers import GENEROUS_S, until

pytestmark = [pytest.mark.slow, pytest.mark.long]

Start = Callable[..., Run]


def overrides(folder: Path, steps: int) -> list[str]:
    fake = Path(__file__).parent / "fake_server"
    others = ("engine.", "replay.max_lag", "replay.oversample", "cluster.", "actor.episode_timeout_s")
    return [
        *(each for each in World.make(folder).overrides(1) if not each.startswith(others)),
        *("cluster.colocated=true", "replay.max_lag=0", "cluster.learner_ranks=2", "cluster.restart_pause_s=1"),
        *("engine.kind=sglang", f"engine.python={sys.executable}", "engine.server.arguments=['--device=cpu']"),
        f"engine.server.environment={{PYTHONPATH: '{fake}:{ROOT}'}}",
        *(f"learner.steps={steps}", "replay.filter.zero_variance=false", "weights.canary=false"),
    ]


def check(run: Run, steps: int) -> None:
    """Check what must hold of a run that is over."""
    lines = run.steps()
    assert [line["step"] for line in lines] == list(range(steps))
    assert {line["lag/max"] for line in lines} == {0}
    assert all(line[f"seconds/{phase}"] >= 0 for line in lines for phase in ("release", "onload", "offload"))
    assert audit(run.dir, read_config(run.dir).replay.sampler.max_times_sampled) == {"lost": 0, "trained_twice": 0}
    assert CRIME not in run.logs(), "a server was used without its memory, or freed it while it had requests"


def server_of(run: Run) -> psutil.Process | None:
    """The server's own process; None while it starts, or others of its actor end."""
    with suppress(psutil.NoSuchProcess):
        found = [
            each
            for each in psutil.Process(run.processes()["actor-0"]).children(recursive=True)
            if "sglang.launch_server" in each.cmdline() and each.name().startswith("python")
        ]
        return found[0] if len(found) == 1 else None
    return None


def test_a_run_in_turns_trains_every_step_on_policy(start: Start, tmp_path: Path) -> None:
    run = start("train", *overrides(tmp_path, 5))
    run.finish()
    check(run, 5)
    (*_, last) = read_lines(metrics_file(run.dir, "actor-0"))
    assert last["gpu_periods"] >= 5
    assert last["server_faults"] == 0


def test_a_run_in_turns_survives_the_deaths_of_learner_actor_and_server_and_a_stop(
    start: Start, tmp_path: Path
) -> None:
    changes, chance = overrides(tmp_path, 12), random.Random(5)
    run = start("train", *changes)
    for step, victim in ((0, "learner-0"), (2, "server"), (4, "actor-0"), (6, "learner-1")):
        run.wait_for_step(step)
        until(lambda: chance.random() < 0.05)  # At any moment of a turn.
        if victim == "server":
            until(lambda: server_of(run)).kill()
        else:
            until(lambda name=victim: name in run.processes())
            run.kill(victim)
    run.wait_for_step(8)
    run.process.send_signal(signal.SIGINT)
    run.process.wait(GENEROUS_S)
    resumed = start("train", *changes)
    resumed.finish()
    check(resumed, 12)
