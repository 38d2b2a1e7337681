"""Ranks that divide the tokens of a pass, or the layers or experts of a model, give what one rank gives
(`divided_ranks.TABLE`)."""

from __future__ import annotations

import shutil
import sys
import threading
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.launcher import run_ranks
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.as_one_rank import assert_close, assert_same_pass, assert_same_runs
from tests.learner.divided_ranks import (
    FOUR_BY_TWO,
    LENGTHS,
    PAIR_OF_LAYERS,
    PAIR_OF_TOKENS,
    RESUMED,
    RUNS,
    TABLE,
    TAKEN_OVER,
    TEMPERATURE,
    Arrangement,
    accumulated,
    configs,
    in_bfloat16,
    one_step_more,
    outputs,
    trained,
    write_families,
)
from tests.learner.support import assert_weights_equal
from tests.learner.two_ranks import fine_tuned

Results = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of all families."""
    folder = tmp_path_factory.mktemp("divided")
    write_families(folder)
    return folder


@pytest.fixture(scope="module")
def one(model: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The runs of all divisions on one rank."""
    return trained(model, folder / "one", folder / "experts", ranks)


@pytest.fixture(scope="module")
def longer(model: Path, folder: Path, ranks: Ranks, one: dict[str, Any]) -> dict[str, Any]:
    """The weights of the runs that other ranks resume, after one more step of one rank."""
    runs = configs(model, folder / "longer", folder / "experts")
    names = sorted({name for names in (*RESUMED.values(), *TAKEN_OVER.values()) for name in names})
    for name in names:
        shutil.copytree(folder / "one" / name, folder / "longer" / name)
    return {name: one_step_more(runs[name], ranks) for name in names}


@pytest.fixture(scope="module")
def results(folder: Path, model: Path, one: dict[str, Any]) -> Results:
    """The results by number of ranks, which start at most once. Two of them go on from a checkpoint of one rank."""
    return {}


def done_by(each: Arrangement, results: Results, folder: Path, model: Path) -> dict[str, Any]:
    """The results of an arrangement."""
    if 0 < torch.cuda.device_count() < each.ranks:
        pytest.skip(f"{each.ranks} ranks need as many GPUs, or a machine without any")
    if each.ranks not in results:
        with chdir(Path(__file__).parents[3]):
            command = [sys.executable, "-m", "tests.learner.divided_ranks", str(folder), str(model)]
            run_ranks(command, each.ranks, threading.Event())
        results[each.ranks] = torch.load(folder / f"{each.ranks}.pt", weights_only=False)
    found: dict[str, Any] = results[each.ranks][str(each)]
    return found


def marked(each: Arrangement) -> Any:
    marks = [pytest.mark.slow, pytest.mark.heavy] if each.ranks == 2 else pytest.mark.long
    return pytest.param(each, marks=marks, id=str(each))


of_the_table = pytest.mark.parametrize("each", [marked(each) for each in TABLE])


@of_the_table
def test_divided_passes_give_the_log_probs_values_and_gradients_of_whole_ones(
    each: Arrangement, folder: Path, model: Path, ranks: Ranks, results: Results
):
    passes = done_by(each, results, folder, model)["passes"]
    assert passes.keys() == set(each.families)
    for family, found in passes.items():
        expected = outputs(folder / each.what / family, ranks, 1.0)
        torch.testing.assert_close(found["canary"], expected["canary"], atol=2e-5, rtol=0)
        for name in LENGTHS:
            assert_same_pass(found[name], expected[name], f"{family} {name}")


@of_the_table
def test_ranks_train_measure_and_publish_what_one_does(
    each: Arrangement, folder: Path, model: Path, one: dict[str, Any], results: Results
):
    found = done_by(each, results, folder, model)["runs"]
    assert_same_runs(found, {name: one[name] for name in RUNS[each.what]})


def assert_goes_on(found: dict[int, Any], before: dict[str, Any], after: dict[int, Any], name: str) -> None:
    """A resumed run begins with the very weights of `before`, and its next step is that of `after`."""
    first, last = sorted(after)
    assert list(found) == [first, last]
    assert_weights_equal(found[first], before["weights"][first])
    for tensor, expected in after[last].items():
        assert_close(found[last][tensor], expected, f"{name} {tensor}")


@pytest.mark.parametrize(
    "each",
    [marked(each) for each in TABLE if each in (PAIR_OF_TOKENS, PAIR_OF_LAYERS) or each.what == "experts"],
)
def test_a_checkpoint_of_several_ranks_resumes_on_one(
    each: Arrangement, folder: Path, model: Path, ranks: Ranks, longer: dict[str, Any], results: Results
):
    runs = done_by(each, results, folder, model)["runs"]
    given = configs(model, folder / str(each), folder / "experts")
    for name in RESUMED[each.what]:
        assert_goes_on(one_step_more(given[name], ranks), runs[name], longer[name], name)


@pytest.mark.parametrize("each", [marked(each) for each in TAKEN_OVER])
def test_a_checkpoint_of_one_rank_resumes_on_two_that_divide_layers_or_experts(
    each: Arrangement, folder: Path, model: Path, one: dict[str, Any], longer: dict[str, Any], results: Results
):
    resumed = done_by(each, results, folder, model)["resumed"]
    assert resumed.keys() == set(TAKEN_OVER[each])
    for name, found in resumed.items():
        assert_goes_on(found, one[name], longer[name], name)


@pytest.mark.slow
@pytest.mark.heavy
def test_ranks_that_divide_layers_fine_tune_and_export_what_one_does(
    model: Path, folder: Path, ranks: Ranks, results: Results
):
    found, expected = (
        done_by(PAIR_OF_LAYERS, results, folder, model)["fine-tuned"],
        fine_tuned(model, folder / "one", ranks),
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(found[name], tensor, name)


@pytest.mark.parametrize(
    "each", [marked(each) for each in TABLE if (each.what, each.together, each.replicas) == ("layers", 2, 1)]
)
def test_a_rank_has_its_part_of_each_matrix_of_a_layer_and_no_more(
    each: Arrangement, folder: Path, model: Path, results: Results
):
    held = done_by(each, results, folder, model)["held"]
    assert held["all"] == sum(held["matrices"]) / 2
    assert held["largest"] == max(held["matrices"]) / 2
    assert held["gathered"] == dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (48,))


@pytest.mark.slow
@pytest.mark.heavy
def test_divided_layers_round_no_more_in_bfloat16_than_whole_ones(
    folder: Path, model: Path, ranks: Ranks, results: Results
):
    exact = outputs(folder / "layers" / "qwen3 4/2", ranks, 1.0)["everywhere"][0]
    whole = in_bfloat16(folder / "layers" / "qwen3 4/2", ranks)
    divided = done_by(PAIR_OF_LAYERS, results, folder, model)["bfloat16"]
    assert (divided - exact).abs().mean() < 1.5 * (whole - exact).abs().mean()


@pytest.mark.long
def test_compiled_layers_that_are_divided_give_the_gradients_of_one_rank(
    folder: Path, model: Path, ranks: Ranks, results: Results
):
    policy = load_policy(ModelConfig(str(folder / "layers" / "qwen3 4/2")), TEMPERATURE, ranks, 96)
    expected, found = accumulated(policy, ranks), done_by(FOUR_BY_TWO, results, folder, model)["compiled"]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, name)
