"""A run from Python: in a thread apart from the event loop of a notebook, with tables, and stopped by an interrupt."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.commands.from_python import interruptible
from asyncrl.config.compose import parsed
from asyncrl.errors import ConfigError
from asyncrl.machine.process import AGAIN_S, stopped_by_ctrl_c
from tests.chaos.world import World
from tests.end_to_end.support import ROOT
from tests.helpers import GENEROUS_S

pytestmark = pytest.mark.slow


@pytest.mark.heavy
def test_a_run_from_python_has_its_rows_and_episodes_as_tables(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    single = ("cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1", "replay.filter.zero_variance=false")
    words = (parsed(word) for word in (*world.overrides(1), *single))
    values = {word.key_or_group: word.value() for word in words}
    more = {
        "run.dir": tmp_path,
        "run.name": "cell",
        "learner.steps": 2,
        "learner.eval_every": 0,
        "learner.export": False,
    }

    async def cell() -> asyncrl.Run:
        return asyncrl.train({**values, **more}, "network.replay_port=0", "network.weights_port=0")

    run = asyncio.run(cell())
    assert (run.folder, run.result, run.is_running) == (tmp_path / "cell", "done", False)
    assert run.config["learner.steps"] == 2
    assert repr(run) == f"Run('{tmp_path}/cell': done)"
    assert run.metrics()["step"].to_pylist() == [0, 1]
    assert run.summary["steps"] == 2
    assert len(run.metrics("actor-0")) >= 1
    assert run.evaluations().num_rows == 0
    trained = run.episodes({"trained"})
    assert set(trained["step"].to_pylist()) == {0, 1}
    assert all(answer for answer in trained["answer"].to_pylist())
    assert {"step", "reward", "finish"} <= set(run.kept().column_names)
    with pytest.raises(ConfigError, match="has no metrics of 'actor-7'; it has those of actor-0"):
        run.metrics("actor-7")


def test_a_wrong_value_is_refused_with_the_message_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.lr=0\.0: it must be a number in \(0, inf\)"):
        asyncrl.train({"model.path": "m", "data.train": "t", "learner.lr": 0})
    with pytest.raises(ConfigError, match="is not a run"):
        asyncrl.Run(tmp_path)
    with pytest.raises(ConfigError, match="n=0: there must be at least one attempt"):
        asyncrl.evaluate("model", data=tmp_path, n=0)
    with pytest.raises(ConfigError, match=r"data=none\.jsonl: the file does not exist"):
        asyncrl.evaluate("model", data="none.jsonl")


INTERRUPTED = """
import threading
from asyncrl.commands.from_python import interruptible

def work(stop):
    print("begun", flush=True)
    assert stop.wait(60)
    print("stopped cleanly", flush=True)

try:
    interruptible(work)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_stops_the_run_cleanly_before_it_is_raised() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    # A shell's background job ignores SIGINT, and so would its children.
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=restore) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=GENEROUS_S)[0] == "stopped cleanly\ninterrupted\n"


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """A worker of pytest may ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_an_interrupt_while_the_thread_starts_stops_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            if self.name == "asyncrl":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading, "Thread", Interrupted)
    stopped = []
    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda stop: stopped.append(stop.wait(GENEROUS_S)))
    assert stopped == [True]


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize(("later", "waits"), [(0.9, True), (1.0, False)])
def test_only_a_second_interrupt_does_not_wait_for_the_work(later: float, waits: bool) -> None:
    stop, ended = threading.Event(), []

    def call() -> None:
        with stopped_by_ctrl_c(stop, iter([0.0, AGAIN_S * later]).__next__):
            signal.raise_signal(signal.SIGINT)
            assert stop.wait(GENEROUS_S)
            signal.raise_signal(signal.SIGINT)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert bool(ended) == waits
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_work_returns_its_result_and_its_error() -> None:
    assert interruptible(lambda stop: not stop.is_set())
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda stop: 1 / 0)
