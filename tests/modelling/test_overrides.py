"""Fields of a model's configuration are set by a run: they reach every role alike, and never change its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Qwen3Config,
    SiglipVisionConfig,
)

from asyncrl.config.changes import changed_keys, values_of
from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.fleet.server import ServerFaultError, check_overrides
from asyncrl.engine.sglang.launch import server_command
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.checkpoint.export import folder_writer
from asyncrl.learner.model.loading import read_model
from asyncrl.learner.model.policy import load_policy
from asyncrl.modelling.opening import beside, open_config, server_overrides
from asyncrl.modelling.overrides import override
from tests.families import family_model
from tests.learner.support import write_model
from tests.one_rank import one_rank

pytestmark = pytest.mark.slow

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"))


def settings(model: Path, **overrides: Any) -> ModelConfig:
    return ModelConfig(str(model), override_config=overrides)


def test_named_fields_have_the_given_values_and_all_others_those_of_the_files(model: Path) -> None:
    stored = AutoConfig.from_pretrained(model).to_dict()
    changed = open_config(settings(model, rms_norm_eps=0.5, rope_parameters=YARN)).to_dict()
    assert changed.pop("rms_norm_eps") == 0.5
    assert changed.pop("rope_parameters") == {**stored.pop("rope_parameters"), **YARN}
    del stored["rms_norm_eps"]
    assert changed == stored


def test_dots_in_a_name_and_mappings_within_mappings_say_the_same(model: Path) -> None:
    nested = open_config(settings(model, rope_parameters={"rope_theta": 5.0}))
    assert nested.rope_parameters["rope_theta"] == 5.0
    assert open_config(settings(model, **{"rope_parameters.rope_theta": 5.0})).to_dict() == nested.to_dict()


def test_a_field_of_a_part_leaves_the_other_fields_of_that_part_as_they_were() -> None:
    text = Gemma3TextConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    changed = override(config, {"text_config.rms_norm_eps": 0.5})
    assert changed.text_config.rms_norm_eps == 0.5
    assert changed.text_config.hidden_size == 32
    assert changed.vision_config.to_dict() == config.vision_config.to_dict()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_norm_epss": 1.0}, "model.override_config.rms_norm_epss: .* no such field; did you mean rms_norm_eps?"),
        ({"rope_theta": 1.0}, "no such field; did you mean rope_parameters.rope_theta?"),
        ({"rope_parameters": {"factr": 2.0}}, "rope_parameters.factr: .* did you mean factor?"),
        ({"dtype": "bfloat16"}, "set model.dtype"),
        ({"model_type": "llama"}, "which code runs the model"),
        ({"rms_norm_eps": "small"}, "transformers refuses it"),
        ({"hidden_act": "selu2"}, "cannot make a model of it.*selu2"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, r"model.layers.1.*: none instead of \["),
        ({"vocab_size": 300}, r"model.embed_tokens.weight: \[300, 32\] instead of \[280, 32\]"),
        ({"rms_norm_eps": float("nan")}, "a number is not finite"),
        ({"id2label": {"0": "a", "7": "b"}}, "id2label.7: there is no such entry"),
        ({"return_dict": False}, "it changes the result of a call"),
        ({"tie_word_embeddings": False}, r"lm_head.weight: \[280, 32\] instead of none"),
    ],
)
def test_what_cannot_be_overridden_is_refused_with_what_is_wrong(
    model: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        open_config(settings(model, **overrides))


@pytest.mark.parametrize("chosen", [0, 9])
def test_a_token_goes_to_experts_that_there_are(chosen: int) -> None:
    config = family_model("qwen3_moe", 1).config
    assert override(config, {"num_experts_per_tok": 1}).num_experts_per_tok == 1
    with pytest.raises(
        ConfigError, match=rf"num_experts_per_tok: {chosen}.*at least 1 and at most {config.num_experts}"
    ):
        override(config, {"num_experts_per_tok": chosen})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits


def test_the_learner_the_engine_and_the_export_compute_with_the_overrides(model: Path, tmp_path: Path) -> None:
    chosen = settings(model, rope_parameters={"rope_theta": 2.0}, rms_norm_eps=0.1)
    before = logits(read_model(ModelConfig(str(model))))
    config = Qwen3Config.from_pretrained(model)
    config.rope_parameters["rope_theta"], config.rms_norm_eps = 2.0, 0.1
    expected = logits(AutoModelForCausalLM.from_pretrained(model, config=config))
    assert (before - expected).abs().max() > 0.01
    ids = torch.arange(24)
    with one_rank() as ranks, torch.no_grad():
        policy = load_policy(chosen, 1.0, ranks, 64)
        found, _ = policy(PackedSequences.of([ids]))
    wanted = expected[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    assert torch.allclose(found[1:], wanted, atol=1e-4)
    assert torch.equal(logits(read_model(chosen)), expected)
    engine = EmbeddedEngine.load(chosen, EngineConfig(slots=1, max_length=64), device="cpu")
    served = engine._passes._model.config
    assert served.rms_norm_eps == 0.1
    assert served.rope_parameters["rope_theta"] == 2.0
    read_model(chosen).save_pretrained(tmp_path)
    folder_writer(chosen)(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_servers_that_are_started_get_whole_mappings_and_others_must_have_them(model: Path) -> None:
    engine, changed = EngineConfig(), settings(model, rope_parameters={"rope_theta": 2.0})
    command = server_command(engine, changed, 1, 0)
    given = json.loads(command[command.index("--json-model-override-args") + 1])
    assert given == {"rope_parameters": {"rope_theta": 2.0, "rope_type": "default"}}
    check_overrides("url", server_overrides(changed), {**given, "more": 1}, "--flag")
    with pytest.raises(ServerFaultError, match=r"rope_parameters; start it with --flag '\{\"rope_parameters\""):
        check_overrides("url", server_overrides(changed), {}, "--flag")
    assert "--json-model-override-args" not in server_command(engine, settings(model), 1, 0)


def test_a_model_of_other_files_beside_the_policy_has_none_of_its_overrides(model: Path) -> None:
    chosen = settings(model, rms_norm_eps=0.1)
    assert beside(chosen, None).override_config == {"rms_norm_eps": 0.1}
    assert beside(chosen, "elsewhere").override_config == {}


def test_a_run_that_resumes_keeps_its_overrides(model: Path) -> None:
    before, after = (values_of(TrainConfig(model=settings(model, rms_norm_eps=each))) for each in (0.1, 0.2))
    with pytest.raises(ConfigError, match=r"model\.override_config="):
        changed_keys(before, after)
