"""A stop ends a rank in the middle of a pass, and loses no step that was done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.errors import StoppedError
from asyncrl.learner.ranks.launcher import Timeouts, run_ranks
from asyncrl.learner.ranks.stopping import Stopping
from asyncrl.runs.lines import read_lines
from tests.helpers import until
from tests.learner.support import assert_weights_equal

pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[3]
TIMEOUTS = Timeouts(poll=0.05, heartbeat=0.1, stop=60.0)
NOTHING_TO_SEE = ("WARNING", "ERROR", "Traceback", "Warning", "destroy")


def start(model: Path, folder: Path, stuck: str = "never") -> None:
    """Train with two ranks. Raises StoppedError: they were asked to stop once one was stuck."""
    stop = threading.Event()

    def stop_once_stuck() -> None:
        until(lambda: (folder / "stuck").exists())
        stop.set()

    command = [sys.executable, "-m", "tests.learner.stuck_in_a_pass", str(model), str(folder), stuck]
    if stuck != "never":
        threading.Thread(target=stop_once_stuck).start()
    with chdir(TREE):
        run_ranks(command, 2, stop, TIMEOUTS)


def weights(folder: Path) -> dict[int, dict[str, Tensor]]:
    return torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """The weights of a run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    start(model, folder)
    return weights(folder)


@pytest.mark.long
@pytest.mark.parametrize(("stuck", "ranks", "kept"), [("before", 2, 2), ("after", 1, 2), ("publish", 1, 3)])
def test_a_stop_in_the_middle_of_a_pass_keeps_the_steps_that_were_done(
    stuck: str,
    ranks: int,
    kept: int,
    whole: dict[int, dict[str, Tensor]],
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    """Within the same pass, or while the other rank waits at its end, or in publishing the weights after it, where the
    other rank would report the step."""
    with pytest.raises(StoppedError):
        start(model, tmp_path, stuck)
    said = capfd.readouterr().err
    assert said.count("the running step is dropped") == ranks
    assert [each for each in NOTHING_TO_SEE if each in said] == []
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{kept:06d}"]
    reported = read_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in reported] == list(range(kept))
    assert all({"loss", "seconds/train", "lag/max"} <= row.keys() for row in reported)
    start(model, tmp_path)
    resumed = weights(tmp_path)
    assert list(resumed) == list(range(kept, 5))
    for version, tensors in resumed.items():
        assert_weights_equal(tensors, whole[version])


BUSY = """
import threading, time
from asyncrl.learner.ranks.stopping import Stopping
stop, stopping = threading.Event(), Stopping()
with stopping.watched(stop, patience_s=0.05):
    {body}
    stop.set()
    time.sleep({pause})
    print("left by itself", flush=True)
"""


@pytest.mark.parametrize(
    ("body", "pause", "status", "said"),
    [
        ("pass", 1000, EXIT_STOPPED, ""),
        ("stopping.end()", 0.5, 0, "left by itself"),
        ("stopping.is_updating = True", 0.5, 0, "left by itself"),
    ],
    ids=["before it met the others", "while it leaves", "while weights change"],
)
def test_a_process_is_ended_only_if_its_main_thread_neither_leaves_nor_changes_weights(
    body: str, pause: float, status: int, said: str
):
    program = BUSY.format(body=body, pause=pause)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=TREE, env={**os.environ}, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (status, said, "")


def test_an_update_that_has_ended_lets_another_thread_answer():
    stopping = Stopping()
    stopping.is_updating = True
    stopping.updated()
    assert not stopping.is_updating
