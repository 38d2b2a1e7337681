"""A run that is scaled down, stopped and resumed while episodes run: they are finished, or handed back at once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.replay.stored import StoredRun
from asyncrl.types import Task
from tests.chaos.world import World
from tests.end_to_end.support import ROOT, Run
from tests.helpers import until

pytestmark = pytest.mark.long

CLOSED_VARIABLE = "ASYNCRL_TEST_CLOSED"
"""The folder in which the file `closed` holds up every episode that has begun."""
WAITS = "waiting up to 600 s for the running episodes"


async def gated(task: Task, base_url: str, api_key: str) -> Mapping[str, float] | None:
    """An agent that answers once, and then waits while the gate is closed. It shows that one of its actor waits."""
    folder = Path(os.environ[CLOSED_VARIABLE])
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        body = {"messages": [*task.messages], "max_tokens": 12}
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
    while (folder / "closed").exists():
        (folder / f"{os.environ[WORKER_VARIABLE]}-waits").touch()
        await asyncio.sleep(0.05)
    return None


def asyncrl(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "asyncrl", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def roles(run: Run) -> set[str]:
    told = json.loads((run.dir / "processes.json").read_text())
    return {name for name, role in told.items() if role["pid"]}


def log_of(run: Run, role: str) -> str:
    return (run.dir / "logs" / f"{role}.log").read_text()


@pytest.fixture
def gate(start: Callable[..., Run], tmp_path: Path) -> Iterator[Path]:
    """The file that closes the gate. The gate is open when the run is stopped, even if the test has failed."""
    yield tmp_path / "closed"
    (tmp_path / "closed").unlink(missing_ok=True)


def test_episodes_of_a_role_that_goes_are_finished_or_handed_back_and_nothing_is_lost_or_trained_twice(
    start: Callable[..., Run], gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLOSED_VARIABLE, str(tmp_path))
    words = World.make(tmp_path).overrides(1)
    # Within the time of this test nothing goes to others because its worker is silent.
    more = ["replay.lease_s=3000", "actor.episode_timeout_s=2000", "cluster.learner_ranks=1"]
    more += [f"actor.agent={gated.__module__}.{gated.__name__}", "actor.concurrency=4"]

    def close_gate() -> None:
        for role in ("actor-0", "actor-1"):
            (tmp_path / f"{role}-waits").unlink(missing_ok=True)
        gate.touch()
        until(lambda: all((tmp_path / f"{role}-waits").exists() for role in ("actor-0", "actor-1")))

    run = start("train", *words, *more, "learner.steps=100000", "cluster.drain_s=600")
    run.wait_for_step(2)
    close_gate()
    asyncrl("scale", str(run.dir), "actors=1", "scorers=1")
    until(lambda: "scoring-1" not in roles(run))
    assert "all leased trajectories are scored" in log_of(run, "scoring-1")
    until(lambda: WAITS in log_of(run, "actor-1"))
    assert "actor-1" in roles(run), "it finishes what it runs"
    gate.unlink()
    until(lambda: "actor-1" not in roles(run))
    assert "all running episodes were delivered" in log_of(run, "actor-1")
    run.wait_for_step(run.newest_step() + 3)

    asyncrl("scale", str(run.dir), "actors=2", "scorers=2")
    until(lambda: {"actor-1", "scoring-1"} <= roles(run))
    close_gate()
    stop = subprocess.Popen([sys.executable, "-m", "asyncrl", "stop", str(run.dir)], cwd=ROOT)
    until(lambda: [log_of(run, role).count(WAITS) for role in ("actor-0", "actor-1")] == [1, 2])
    assert run.process.poll() is None, "the stop waits for the episodes"
    gate.unlink()
    assert (stop.wait(), run.process.wait()) == (0, 130)
    assert log_of(run, "actor-0").count("all running episodes were delivered") == 1
    assert log_of(run, "actor-1").count("all running episodes were delivered") == 2
    assert "did not stop in time" not in run.output

    steps = run.newest_step() + 12
    resumed = start("train", *words, *more, f"learner.steps={steps}", "cluster.drain_s=0")
    close_gate()
    asyncrl("scale", str(run.dir), "actors=1", "scorers=1")
    until(lambda: roles(run) == {"replay", "learner", "actor-0", "scoring-0"})
    assert "episodes did not end within cluster.drain_s" in log_of(run, "actor-1")
    gate.unlink()
    resumed.finish()
    assert sorted({line["step"] for line in resumed.steps()}) == list(range(steps))
    with closing(StoredRun(run.dir / "replay")) as stored:
        audit = stored.audit(uses=1)
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)
