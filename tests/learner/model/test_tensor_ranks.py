"""Ranks that divide the layers of a model give what one rank gives."""

from __future__ import annotations

import sys
import threading
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.model.tensor_ranks import divide_layers
from asyncrl.learner.ranks.launcher import Meeting, Membership, run_ranks
from asyncrl.learner.ranks.ranks import Ranks, joined
from asyncrl.modelling.context import ContextGroup
from tests.learner.as_one_rank import assert_close, assert_same_pass, assert_same_runs
from tests.learner.context_ranks import LENGTHS, SIZES, outputs
from tests.learner.support import assert_weights_equal
from tests.learner.tensor_ranks import (
    ARRANGEMENTS,
    TEMPERATURE,
    accumulated,
    configs,
    in_bfloat16,
    one_step_more,
    trained,
    write_families,
)
from tests.learner.two_ranks import fine_tuned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    write_families(folder)
    return folder


def done_by(count: int, folder: Path, model: Path) -> dict[Any, Any]:
    """What so many ranks did."""
    if 0 < torch.cuda.device_count() < count:
        pytest.skip(f"{count} ranks need as many GPUs, or a machine without any")
    with chdir(Path(__file__).parents[3]):
        command = [sys.executable, "-m", "tests.learner.tensor_ranks", str(folder), str(model)]
        run_ranks(command, count, threading.Event())
    return torch.load(folder / f"{count}.pt", weights_only=False)


@pytest.fixture(scope="module")
def two(folder: Path, model: Path, one: dict[str, Any]) -> dict[Any, Any]:
    """They go on from a checkpoint of one rank, too."""
    return done_by(2, folder, model)


@pytest.fixture(scope="module")
def four(folder: Path, model: Path) -> dict[Any, Any]:
    return done_by(4, folder, model)


@pytest.fixture(scope="module")
def one(model: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    return trained(model, folder / "one", ranks)


by_two_and_four = pytest.mark.parametrize(
    "ranked", [pytest.param("two", marks=pytest.mark.slow), pytest.param("four", marks=pytest.mark.long)]
)


@by_two_and_four
def test_divided_layers_give_the_log_probs_values_and_gradients_of_whole_ones(
    ranked: str, folder: Path, ranks: Ranks, request: pytest.FixtureRequest
):
    done = request.getfixturevalue(ranked)
    tried = [key for key in done if isinstance(key, tuple) and len(key) == 3]
    assert len(tried) == sum(len(families) for *_, families in ARRANGEMENTS[2 if ranked == "two" else 4])
    for key in tried:
        found, expected = done[key], outputs(folder / key[2], ranks, 1.0)
        torch.testing.assert_close(found["canary"], expected["canary"], atol=2e-5, rtol=0)
        for name in LENGTHS:
            assert_same_pass(found[name], expected[name], f"{key} {name}")


@by_two_and_four
def test_ranks_that_divide_layers_train_measure_and_publish_what_one_does(
    ranked: str, one: dict[str, Any], request: pytest.FixtureRequest
):
    done = request.getfixturevalue(ranked)
    runs = [done[key] for key in done if isinstance(key, tuple) and len(key) == 2]
    assert len(runs) == len(ARRANGEMENTS[2 if ranked == "two" else 4])
    for found in runs:
        assert_same_runs(found, one)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_that_divide_layers_resumes_on_one(
    model: Path, folder: Path, ranks: Ranks, two: dict[Any, Any]
):
    whole = two[2, 1]["critic"]["weights"]
    config = configs(model, folder / "2 ranks, 2, 1")["critic"]
    steps, resumed = config.learner.steps, one_step_more(config, ranks)
    assert list(resumed) == [steps, steps + 1]
    assert_weights_equal(resumed[steps], whole[steps])


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_resumes_on_ranks_that_divide_layers(
    model: Path, folder: Path, ranks: Ranks, one: dict[str, Any], two: dict[Any, Any]
):
    config = configs(model, folder / "one")["shared"]
    steps, found, expected = config.learner.steps, two["resumed"], one_step_more(config, ranks)
    assert list(found) == list(expected) == [steps, steps + 1]
    assert_weights_equal(found[steps], one["shared"]["weights"][steps])
    for name, tensor in expected[steps + 1].items():
        assert_close(found[steps + 1][name], tensor, name)


@pytest.mark.slow
def test_ranks_that_divide_layers_fine_tune_and_export_what_one_does(
    model: Path, folder: Path, ranks: Ranks, two: dict[Any, Any]
):
    expected = fine_tuned(model, folder / "one", ranks)
    assert two["fine-tuned"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(two["fine-tuned"][name], tensor, name)


@by_two_and_four
def test_a_rank_has_its_part_of_each_matrix_of_a_layer_and_no_more(ranked: str, request: pytest.FixtureRequest):
    held = request.getfixturevalue(ranked)["held"]
    assert held["all"] == sum(held["matrices"]) / 2
    assert held["largest"] == max(held["matrices"]) / 2
    assert held["gathered"] == dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (48,))


@pytest.mark.slow
def test_divided_layers_round_no_more_in_bfloat16_than_whole_ones(folder: Path, ranks: Ranks, two: dict[Any, Any]):
    exact = outputs(folder / "qwen3 4/2", ranks, 1.0)["everywhere"][0]
    whole = in_bfloat16(folder / "qwen3 4/2", ranks)
    assert (two["bfloat16"] - exact).abs().mean() < 1.5 * (whole - exact).abs().mean()


@pytest.mark.parametrize(
    ("family", "values", "refusal"),
    [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}, "has 3 heads, which 2 ranks cannot divide"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "has 3 heads of keys, which 2 ranks can neither",
        ),
        ("llama", {"intermediate_size": 21}, "has 21 neurons in an MLP, which 2 ranks cannot divide"),
        ("phi3", {"pad_token_id": 0}, "plan does not divide self_attn.o_proj"),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 8}, "plan does not divide mlp"),
        ("cohere", {"use_qk_norm": True}, "plan does not divide self_attn.q_norm"),
        ("gpt2", {}, "GPT2LMHeadModel has no plan in transformers"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused_by_name(
    family: str, values: dict[str, Any], refusal: str, ranks: Ranks
):
    shape = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2} | values
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    layers = [each for each in model.modules() if type(each).__name__ in set(model._no_split_modules)]
    together = replace(ranks, context=ContextGroup("", 2, 0, divides_layers=True))
    with pytest.raises(ConfigError, match=rf"learner\.tensor_ranks=2: a .*{refusal}.*; use 1"):
        divide_layers(model, layers, together)


def test_groups_that_the_ranks_of_a_copy_cannot_be_dealt_out_to_are_refused():
    with (
        pytest.raises(ConfigError, match=r"learner\.tensor_ranks=2 learner\.replicas=2: 6 ranks .* no multiple of 4"),
        joined(2, member=Membership(0, 0, Meeting(0, 6, "nowhere")), tensor_ranks=2),
    ):
        pass


@pytest.mark.long
def test_compiled_layers_that_are_divided_give_the_gradients_of_one_rank(
    folder: Path, ranks: Ranks, four: dict[Any, Any]
):
    expected = accumulated(load_policy(ModelConfig(str(folder / "qwen3 4/2")), TEMPERATURE, ranks, 96), ranks)
    assert four["compiled"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(four["compiled"][name], gradient, name)
