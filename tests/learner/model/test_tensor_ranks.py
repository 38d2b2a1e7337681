"""Layers that ranks cannot divide are refused. test_divided_ranks.py compares those that they can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.learner.model.tensor_ranks import check_division, divide_layers
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import Meeting, Membership
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.context import ContextGroup
from tests.learner.divided_ranks import SIZES


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


def test_a_model_whose_layers_are_not_found_is_refused():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, num_attention_heads=4))
    del model.model.layers
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no layers that ranks can divide; use 1"):
        check_division(model, 2)


def test_groups_that_the_ranks_of_a_copy_cannot_be_dealt_out_to_are_refused():
    with (
        pytest.raises(ConfigError, match=r"learner\.tensor_ranks=2 learner\.replicas=2: 6 ranks .* a multiple of 4"),
        joined(2, member=Membership(0, 0, Meeting(0, 6, "nowhere")), tensor_ranks=2),
    ):
        pass
