from __future__ import annotations

import logging
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.modelling.freezing import FrozenPart, freeze, frozen_names
from tests.families import FAMILIES, family_config
from tests.mixtures import MIXTURES


def empty(family: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(family_config(family))


def frozen(model: nn.Module, *wanted: str) -> set[str]:
    return set(frozen_names(model, wanted, "model.freeze"))


@pytest.mark.parametrize(
    ("family", "experts", "router"),
    [
        ("qwen3_moe", ["*.mlp.experts.*"], ["*.mlp.gate.*"]),
        ("mixtral", ["*.mlp.experts.*"], ["*.mlp.gate.*"]),
        ("qwen2_moe", ["*.mlp.experts.*", "*.shared_expert.*"], ["*.mlp.gate.*", "*.shared_expert_gate.*"]),
        ("deepseek_v3", ["*.mlp.experts.*", "*.shared_experts.*"], ["*.mlp.gate.weight"]),
        ("gpt_oss", ["*.mlp.experts.*"], ["*.mlp.router.*"]),
        ("olmoe", ["*.mlp.experts.*"], ["*.mlp.gate.*"]),
    ],
)
def test_rules_find_the_experts_and_the_routers_of_a_family(family: str, experts: list[str], router: list[str]):
    model = empty(family)

    def matching(patterns: list[str]) -> set[str]:
        return {name for name, _ in model.named_parameters() if any(fnmatchcase(name, each) for each in patterns)}

    assert frozen(model, "moe_experts") == matching(experts)
    assert frozen(model, "moe_router") == matching(router)
    assert frozen(model, "moe_all") == matching(experts + router) == frozen(model, "moe_experts", "moe_router")


@pytest.mark.parametrize("family", [*MIXTURES, "qwen2_moe", "gpt_oss"])
def test_verls_rule_is_word_for_word_that_of_its_fork(family: str):
    """verl's rule misses routers that are called gate, and a shared expert's gate_proj."""
    model = empty(family)
    expected = set()
    for name, _ in model.named_parameters():
        if "gate_proj" in name:
            continue
        parts = (".router.", ".experts.", "experts.", "shared_expert", "moe")
        if any(part in name for part in parts) or name.endswith(".router.weight"):
            expected.add(name)
    assert frozen(model, "verl_moe") == expected
    missed = {name for name in frozen(model, "moe_all") - expected if ".mlp.gate." in name or "gate_proj" in name}
    assert bool(missed) == (family != "gpt_oss")


@pytest.mark.parametrize("family", ["qwen3", "qwen3 tied"])
def test_embeddings_are_frozen_with_a_head_that_is_tied_to_them_and_without_another(family: str):
    model = empty(family)
    assert frozen(model, "embeddings") == {"model.embed_tokens.weight"}
    tied = "tie_word_embeddings" in FAMILIES[family]
    assert frozen(model, "lm_head.*") == {"model.embed_tokens.weight" if tied else "lm_head.weight"}


def test_the_tower_of_a_model_with_images_is_frozen_and_what_projects_into_the_text_is_not():
    model = nn.ModuleDict({"vision_tower": nn.Linear(2, 3), "projector": nn.Linear(3, 2), "text": nn.Linear(2, 2)})
    assert frozen(model, "vision") == {"vision_tower.weight", "vision_tower.bias"}


def test_what_is_frozen_is_listed_by_module_with_counts(caplog: pytest.LogCaptureFixture):
    model = empty("qwen3_moe")
    with caplog.at_level(logging.INFO):
        parts = freeze(model, ["moe_router", "*.layers.0.input_layernorm.*"], "model.freeze")
    assert parts == [
        FrozenPart("model.layers.*.mlp.gate", 3, 3 * 4 * 64),
        FrozenPart("model.layers.*.input_layernorm", 1, 64),
    ]
    total = sum(each.numel() for each in model.parameters())
    assert f"freezes 832 of {total:,} parameters" in caplog.text
    assert "model.layers.*.mlp.gate: 768 in 3 tensors" in caplog.text
    assert sum(each.numel() for each in model.parameters() if not each.requires_grad) == 832


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("moe_all", "this rule freezes nothing in a Qwen3ForCausalLM, which has parameters in model.embed_tokens"),
        ("vision", "freezes nothing"),
        ("*.nowhere.*", "this pattern freezes nothing"),
        ("moe_expert", "is the rule moe_experts meant"),
        ("*", "freezes all parameters"),
    ],
)
def test_what_freezes_nothing_or_everything_is_refused(wanted: str, reason: str):
    with pytest.raises(ConfigError, match=reason.replace("*", r"\*")):
        frozen_names(empty("qwen3"), ["embeddings", wanted], "model.freeze")
