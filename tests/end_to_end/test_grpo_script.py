"""examples/grpo_script.py trains the weights that the asynchronous system trains at max_lag=0, bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.compose import read
from tests.compat.verl.controller.operators.support import words
from tests.end_to_end.support import ROOT, Run

pytestmark = pytest.mark.slow

Start = Callable[..., Run]
ALIKE = ("replay.max_lag=0", "engine.slots=1", "actor.concurrency=1", "scoring.batch_trajectories=1")
"""Each episode and each score is computed alone, and groups are complete in the order of the feed. Otherwise the shape
of a batch of the engine, which depends on time, would move the last bits of log-probs."""


def script() -> Any:
    spec = importlib.util.spec_from_file_location("grpo_script", ROOT / "examples" / "grpo_script.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(start: Start, folder: Path, given: Sequence[str]) -> None:
    """Train with both, and compare every weight and every moment of the optimiser."""
    run = start("train", *given, *ALIKE)
    run.finish()
    script().train(read([*given, *ALIKE]), folder / "script")
    theirs, ours = (
        load_file(path / "step-000003" / "rank-00000.safetensors")
        for path in (run.dir / "checkpoints", folder / "script")
    )
    assert theirs.keys() == ours.keys()
    assert [name for name in theirs if not torch.equal(theirs[name], ours[name])] == []
    untrained = load_file(Path(read(given).model.path) / "model.safetensors")
    moved = [name for name in untrained if not torch.equal(untrained[name], ours[f"policy/weights/model.{name}"])]
    assert len(moved) == len(untrained), "nothing was learned"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="one update a step", marks=pytest.mark.long),
        pytest.param(["learner.minibatches=2"], id="two updates a step"),
    ],
)
def test_the_script_gives_the_weights_of_a_synchronous_run(start: Start, tmp_path: Path, changes: list[str]) -> None:
    compare(start, tmp_path, words(tmp_path, *changes))


@pytest.mark.long
def test_it_does_so_with_tools_and_a_process_reward_model(start: Start, prepared: list[str], tmp_path: Path) -> None:
    few = ("learner.steps=3", "learner.batch_size=16", "learner.group_size=4", "learner.checkpoint_every=3")
    compare(start, tmp_path, [*prepared, "algorithm=grpo", "learner.eval_every=0", *few])


def test_the_page_for_users_of_verl_shows_the_script_as_it_is() -> None:
    source = (ROOT / "examples" / "grpo_script.py").read_text()
    function = source[source.index("def train(") : source.index("\n\nif __name__")].rstrip()
    assert function in (ROOT / "docs" / "verl.md").read_text()
