from __future__ import annotations

import json
import shutil
import sys
import threading
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.learner.checkpoint.export import export_checkpoint
from asyncrl.learner.ranks.launcher import run_ranks
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.observe.spans import spans_file
from asyncrl.runs.kept import KeptEpisodes
from tests.learner.support import Run, assert_weights_close, assert_weights_equal, made_once
from tests.learner.two_ranks import (
    COPIED,
    EXPERTS,
    FREQUENCIES,
    MEMBERS,
    OPTIMIZERS,
    configs,
    fine_tuned,
    kept_by_rounding,
    make_wide,
    restore_wide,
    train_all,
    train_wide,
)
from tests.mixtures import MIXTURES

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


def done_by(count: int, replicas: int, *arguments: object) -> tuple[dict[str, Any], Path]:
    """Run so many ranks. Returns their results and their folder, the third of the arguments."""
    if 0 < torch.cuda.device_count() < count:
        pytest.skip(f"{count} ranks need as many GPUs, or a machine without any")
    with chdir(Path(__file__).parents[3]):
        given = (*arguments[:3], replicas, *arguments[3:])
        run_ranks([sys.executable, "-m", "tests.learner.two_ranks", *map(str, given)], count, threading.Event())
    return torch.load(Path(str(arguments[2])) / "results.pt"), Path(str(arguments[2]))


@pytest.fixture(scope="module")
def two(model: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return made_once(tmp_path_factory, "two", lambda folder: done_by(2, 1, model, mixture, folder)[0])


@pytest.fixture(scope="module")
def copies(
    model: Path, mixture: Path, two: tuple[dict[str, Any], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Two copies of the model, each over two of four ranks. The run "lonely" goes on from the checkpoint of two."""
    folder = tmp_path_factory.mktemp("copies")
    shutil.copytree(two[1] / "lonely", folder / "lonely")
    return done_by(4, 2, model, mixture, folder, "even", "alike", "adapters", "lonely")


@pytest.fixture(scope="module")
def pair(two: tuple[dict[str, Any], Path]) -> tuple[dict[str, Any], Path]:
    """Two copies of the model, each on one rank of two."""
    return {"results": two[0]["copies"]}, two[1] / "copies"


@pytest.fixture(scope="module")
def one_and_folder(
    model: Path, mixture: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    return made_once(tmp_path_factory, "one", lambda folder: train_all(model, mixture, folder, ranks))


@pytest.fixture(scope="module")
def one(one_and_folder: tuple[dict[str, Any], Path]) -> dict[str, Any]:
    return one_and_folder[0]


@pytest.fixture(scope="module")
def one_folder(one_and_folder: tuple[dict[str, Any], Path]) -> Path:
    return one_and_folder[1]


@pytest.mark.parametrize(
    "batch",
    [
        "even",
        "odd",
        "lonely",
        "alike",
        "critic",
        "mixture",
        "balanced",
        "replayed",
        "frozen",
        "frozen mixture",
        "adapters",
        "shown",
        "images",
        "frozen tower",
        "members",
    ],
)
def test_two_ranks_train_as_one_does(batch: str, one: dict[str, Any], two: tuple[dict[str, Any], Path]):
    assert two[0]["size"] == 2
    (expected, expected_metrics), (weights, metrics) = one[batch], two[0]["results"][batch]
    assert weights.keys() == expected.keys()
    # Adam's first steps are as long for the smallest gradients, such as those of some biases of the tower.
    error = 5e-5 if batch == "images" else 1e-5
    for version, tensors in weights.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[version][name], atol=error, rtol=0)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=1e-4)
    assert metrics["lag/mean"] == expected_metrics["lag/mean"]
    assert metrics["bins"] == pytest.approx(expected_metrics["bins"], abs=1e-9)
    raw = sum(share for (_, name), share in metrics["bins"].items() if name.startswith("ratio_bin/"))
    assert raw == pytest.approx(len(metrics["loss"]))
    for name in MEMBERS if batch == "members" else ():
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
    routing = [name for name in metrics if name.startswith("routing/")]
    assert len(routing) == (3 if batch == "replayed" else 0)
    for name in routing:
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-6), name
    experts = [name for name in metrics if name in EXPERTS]
    assert len(experts) == (3 if batch in ("mixture", "balanced", "replayed", "frozen mixture") else 0)
    for name in experts:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4), name


def test_two_ranks_fine_tune_as_one_does(model: Path, ranks: Ranks, two: tuple[dict[str, Any], Path], tmp_path: Path):
    assert_weights_close(fine_tuned(model, tmp_path, ranks), two[0]["sft"], atol=1e-5)


def test_two_ranks_measure_what_rounding_leaves_of_adapters_as_one_does(
    model: Path, ranks: Ranks, two: tuple[dict[str, Any], Path]
):
    assert two[0]["kept"] == pytest.approx(kept_by_rounding(model, ranks), rel=1e-4)


def test_recording_spans_changes_no_bit_of_what_two_ranks_train(two: tuple[dict[str, Any], Path]):
    plain, recorded = two[0]["results"]["odd"][0], two[0]["recorded"]
    assert list(plain) == list(recorded)
    for version, tensors in plain.items():
        assert_weights_equal(recorded[version], tensors)
    for rank in range(2):
        lines = spans_file(two[1] / "recorded", f"learner-{rank}").read_text().splitlines()
        names = {line[0] for line in map(json.loads, lines) if isinstance(line, list)}
        assert "train" in names, names


def test_two_ranks_with_a_copy_of_the_model_each_train_as_one_does(
    one: dict[str, Any], pair: tuple[dict[str, Any], Path]
):
    assert pair[0]["results"].keys() == set(COPIED)
    for batch, (weights, _) in pair[0]["results"].items():
        for version, tensors in weights.items():
            assert_weights_close(tensors, one[batch][0][version], atol=1e-5)


@pytest.mark.long
def test_copies_of_the_model_over_two_ranks_each_train_as_one_rank_does(
    one: dict[str, Any], two: tuple[dict[str, Any], Path], copies: tuple[dict[str, Any], Path]
):
    assert copies[0]["size"] == 4
    for batch in ("even", "alike", "adapters"):
        weights, _ = copies[0]["results"][batch]
        for version, tensors in weights.items():
            assert_weights_close(tensors, one[batch][0][version], atol=1e-5)
    resumed = copies[0]["results"]["lonely"][0]
    assert list(resumed) == [2]
    assert_weights_equal(resumed[2], two[0]["results"]["lonely"][0][2])


@pytest.mark.parametrize("batch", ["even", "odd", "lonely", "alike", "critic", "members"])
def test_several_ranks_keep_the_episodes_that_one_keeps(
    batch: str, one: dict[str, Any], one_folder: Path, two: tuple[dict[str, Any], Path]
):
    """An episode is whole wherever its tokens were trained: members of a group may be on different ranks."""
    left, right = (KeptEpisodes(folder / batch / "run") for folder in (one_folder, two[1]))
    assert left.rows() == right.rows()
    assert {row.step for row in left.rows()} == set(range(len(one[batch][0]) - 1))
    for row in left.rows():
        expected, found = (kept.read(row.step, row.id) for kept in (left, right))
        assert np.array_equal(found.trajectory.tokens, expected.trajectory.tokens)
        for name in ("advantages", "importance_weights", "proximal_logprobs"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-3, atol=1e-4)
        assert (found.proximal_logprobs[found.trajectory.loss_mask] < 0).all()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("batch", "by"),
    [
        *(("even", "two"), ("mixture", "two"), ("adapters", "two"), ("even", "pair")),
        pytest.param("even", "copies", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_several_ranks_resumes_on_one(
    batch: str, by: str, model: Path, mixture: Path, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
):
    results, folder = request.getfixturevalue(by)
    shutil.copytree(folder / batch, tmp_path / batch)  # Other tests read the folder, maybe at the same time.
    config = configs(model, mixture, tmp_path)[batch]
    steps = config.learner.steps
    run = Run(replace(config, learner=replace(config.learner, steps=steps + 1))).train(ranks)
    assert list(run.weights) == [steps, steps + 1]
    for name, tensor in results["results"][batch][0][steps].items():
        assert torch.equal(tensor, run.weights[steps][name])


@pytest.mark.parametrize("batch", ["odd", "critic", "mixture", "adapters"])
def test_a_checkpoint_of_two_ranks_is_exported_with_the_bytes_that_the_end_of_the_run_wrote(
    batch: str, model: Path, mixture: Path, two: tuple[dict[str, Any], Path], tmp_path: Path
):
    config = configs(model, mixture, two[1])[batch]
    run = two[1] / batch / "run"
    export_checkpoint(config.model, max((run / "checkpoints").iterdir()), tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(run / "model")


@pytest.mark.parametrize(("optimizer", "error"), [("muon", 1e-6), ("adamw_8bit", 2e-3)])
def test_an_optimizer_trains_alike_on_one_rank_and_two_and_goes_on_with_another_number(
    optimizer: str, error: float, ranks: Ranks, two: tuple[dict[str, Any], Path]
):
    """Small shards have no moments of 8 bits, and a resume on another number of ranks rounds them once more."""
    if optimizer not in OPTIMIZERS:
        pytest.skip("torchao is not installed")
    results, folder = two
    weights = results["optimizers"][optimizer]
    whole, resumed = make_wide(optimizer, ranks), make_wide(optimizer, ranks)
    assert_weights_close(weights, train_wide(whole, range(5)), error)
    restore_wide(resumed, folder / optimizer, ranks)
    assert_weights_close(weights, train_wide(resumed, range(3, 5)), error)
    large = "layers.0.weight"
    torch.testing.assert_close(weights[large], whole.module.get_parameter(large).full_tensor(), atol=1e-6, rtol=0)


def test_shards_of_any_shape_and_stacked_experts_are_gathered_as_they_are_saved(two: tuple[dict[str, Any], Path]):
    """The ranks compared them: see `two_ranks.check_gathering`."""
    assert two[0]["gathered"] == ["odd shapes", *MIXTURES]


def test_updates_are_the_same_however_often_ranks_exchange_and_whatever_they_gather_at_once(
    two: tuple[dict[str, Any], Path],
):
    """The ranks compared them: see `two_ranks.check_exchanges`."""
    assert two[0]["exchanged"] == len(FREQUENCIES)


def test_when_one_rank_is_stopped_all_leave(two: tuple[dict[str, Any], Path]):
    assert two[0]["stopped"]
