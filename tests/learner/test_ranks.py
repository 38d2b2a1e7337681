from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.learner.ranks import Ranks, joined
from asyncrl.learner.run import train
from tests.learner.support import FakeMetrics, FakePublisher, FakeReplay, launch
from tests.learner.two_ranks import configs, train_all


@pytest.fixture(scope="module")
def two(model: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two ranks did, and their folder."""
    folder = tmp_path_factory.mktemp("two")
    launch("tests.learner.two_ranks", 2, str(model), str(mixture), str(folder))
    return torch.load(folder / "results.pt"), folder


@pytest.fixture(scope="module")
def one(model: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    with joined() as ranks:
        return train_all(model, mixture, tmp_path_factory.mktemp("one"), ranks)


@pytest.mark.parametrize("batch", ["even", "odd", "lonely", "critic", "mixture"])
def test_two_ranks_train_as_one_does(batch: str, one: dict[str, Any], two: tuple[dict[str, Any], Path]):
    assert two[0]["size"] == 2
    (expected, expected_metrics), (weights, metrics) = one[batch], two[0]["results"][batch]
    assert weights.keys() == expected.keys()
    for version, tensors in weights.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[version][name], atol=1e-5, rtol=0)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=1e-4)
    assert metrics["lag/histogram"] == expected_metrics["lag/histogram"]


@pytest.mark.parametrize("batch", ["even", "mixture"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(
    batch: str, model: Path, mixture: Path, ranks: Ranks, two: tuple[dict[str, Any], Path]
):
    results, folder = two
    config = configs(model, mixture, folder)[batch]
    steps = config.learner.steps
    publisher = FakePublisher()
    longer = replace(config, learner=replace(config.learner, steps=steps + 1))
    train(longer, ranks, FakeReplay(longer), publisher, FakeMetrics(), threading.Event())
    assert list(publisher.weights) == [steps, steps + 1]
    for name, tensor in results["results"][batch][0][steps].items():
        assert torch.equal(tensor, publisher.weights[steps][name])


def test_when_one_rank_is_stopped_all_leave(two: tuple[dict[str, Any], Path]):
    assert two[0]["stopped"]
