"""The families of policies that SGLang servers may get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.engine.from_config import open_engine
from asyncrl.engine.sglang.families import PROVEN, UNPROVEN, check_family, request_group
from asyncrl.errors import ConfigError
from tests.families import FAMILIES, family_config

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def configured(folder: Path, policy: Any, **engine: Any) -> TrainConfig:
    policy.save_pretrained(folder)
    config = TrainConfig(model=ModelConfig(path=str(folder)))
    for key, value in {"kind": "sglang", "urls": ["http://127.0.0.1:1"], **engine}.items():
        setattr(config.engine, key, value)
    return config


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.split()[0] in PROVEN])
def test_a_proven_family_is_taken(family: str, tmp_path: Path) -> None:
    config = configured(tmp_path, family_config(family))
    check_family(config.engine, config.model)


@pytest.mark.parametrize(
    ("family", "reason"), [*UNPROVEN.items(), ("bloom", "no test has tried this family")], ids=[*UNPROVEN, "bloom"]
)
def test_another_family_is_refused_with_the_reason_unless_the_configuration_says_so(
    family: str, reason: str, tmp_path: Path
) -> None:
    config = configured(tmp_path, AutoConfig.for_model(family))
    with pytest.raises(ConfigError) as refused:
        check_family(config.engine, config.model)
    assert reason in str(refused.value)
    assert f"a {family} model" in str(refused.value)
    config.engine.unproven_family = True
    check_family(config.engine, config.model)


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_other_engines_take_any_family(kind: str, tmp_path: Path) -> None:
    config = configured(tmp_path, AutoConfig.for_model("gpt_oss"), kind=kind)
    check_family(config.engine, config.model)


def test_an_actor_opens_no_fleet_for_a_family_that_is_not_proven(tmp_path: Path) -> None:
    config = configured(tmp_path, AutoConfig.for_model("gpt_oss"))
    with pytest.raises(ConfigError, match="gpt_oss"):
        open_engine(config)


def test_the_page_of_models_lists_all_families() -> None:
    table = DOCS.read_text()
    assert {name for name in PROVEN | UNPROVEN.keys() if f"`{name}`" not in table} == set()


def test_projections_that_sglang_concatenates_reach_it_in_one_request() -> None:
    layer = "model.layers.1.self_attn"
    first, second = f"{layer}.q_a_proj.weight", f"{layer}.kv_a_proj_with_mqa.weight"
    others = [f"{layer}.q_b_proj.weight", "model.layers.2.self_attn.q_a_proj.weight", f"{layer}.q_a_proj.bias"]
    assert request_group(first) == request_group(second)
    assert len({request_group(name) for name in [first, *others]}) == 4
