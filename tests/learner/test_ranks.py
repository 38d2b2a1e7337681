from __future__ import annotations

import sys
import threading
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.learner.export import export_checkpoint
from asyncrl.learner.launcher import run_ranks
from asyncrl.learner.ranks import Ranks
from tests.learner.support import Run
from tests.learner.two_ranks import configs, train_all
from tests.mixtures import MIXTURES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or a machine without any"),
]


@pytest.fixture(scope="module")
def two(model: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two ranks did, and their folder."""
    folder = tmp_path_factory.mktemp("two")
    with chdir(Path(__file__).parents[2]):
        command = [sys.executable, "-m", "tests.learner.two_ranks", *map(str, (model, mixture, folder))]
        run_ranks(command, 2, threading.Event())
    return torch.load(folder / "results.pt"), folder


@pytest.fixture(scope="module")
def one(model: Path, mixture: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_all(model, mixture, tmp_path_factory.mktemp("one"), ranks)


@pytest.mark.parametrize("batch", ["even", "odd", "lonely", "alike", "critic", "mixture"])
def test_two_ranks_train_as_one_does(batch: str, one: dict[str, Any], two: tuple[dict[str, Any], Path]):
    assert two[0]["size"] == 2
    (expected, expected_metrics), (weights, metrics) = one[batch], two[0]["results"][batch]
    assert weights.keys() == expected.keys()
    for version, tensors in weights.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[version][name], atol=1e-5, rtol=0)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=1e-4)
    assert metrics["lag/mean"] == expected_metrics["lag/mean"]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("batch", ["even", "mixture"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(
    batch: str, model: Path, mixture: Path, ranks: Ranks, two: tuple[dict[str, Any], Path]
):
    results, folder = two
    config = configs(model, mixture, folder)[batch]
    steps = config.learner.steps
    run = Run(replace(config, learner=replace(config.learner, steps=steps + 1))).train(ranks)
    assert list(run.weights) == [steps, steps + 1]
    for name, tensor in results["results"][batch][0][steps].items():
        assert torch.equal(tensor, run.weights[steps][name])


@pytest.mark.parametrize("batch", ["odd", "critic", "mixture"])
def test_a_checkpoint_of_two_ranks_is_exported_with_the_bytes_that_the_end_of_the_run_wrote(
    batch: str, model: Path, mixture: Path, two: tuple[dict[str, Any], Path], tmp_path: Path
):
    config = configs(model, mixture, two[1])[batch]
    run = two[1] / batch / "run"
    export_checkpoint(config.model, max((run / "checkpoints").iterdir()), tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(run / "model")


def test_shards_of_any_shape_and_stacked_experts_are_gathered_as_they_are_saved(two: tuple[dict[str, Any], Path]):
    """The ranks compared them: see `two_ranks.check_gathering`."""
    assert two[0]["gathered"] == ["odd shapes", *MIXTURES]


def test_when_one_rank_is_stopped_all_leave(two: tuple[dict[str, Any], Path]):
    assert two[0]["stopped"]
