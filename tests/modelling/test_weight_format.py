"""Pushed tensors are those of weight files, and received tensors become the model's again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.shapes import model_shapes, stored_shapes
from asyncrl.modelling.weight_format import WeightFormat, model_tensors
from tests.engine.support import parameters
from tests.families import FAMILIES, family_model
from tests.mixtures import BIASED, MIXTURES, mixture, save_mixture


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_published_tensors_are_those_that_save_pretrained_writes_and_become_the_models_again(
    family: str, tmp_path: Path
):
    made = family_model(family, 0)
    made.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for model in (made, AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")):
        published, own = parameters(model), model_tensors(model)
        assert published.keys() == written.keys()
        for name, tensor in written.items():
            assert torch.equal(published[name], tensor), name
            assert published[name].dtype == tensor.dtype, name
        restored = WeightFormat(model).restore(published)
        assert restored.keys() == own.keys()
        assert all(torch.equal(restored[name], own[name]) for name in own)
    assert model_shapes(ModelConfig(path=str(tmp_path))).tensors == WeightFormat(made).shapes


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_is_a_tensor_and_every_stacked_one_a_part_of_its_own(family: str):
    published = WeightFormat(mixture(family))
    experts = [name for name in published.shapes if re.search(r"\.experts\.\d\.\w+\.weight$", name)]
    layers = 1 if family in BIASED else 2
    assert len(experts) == layers * 4 * 3
    assert [len(part.model) for part in published.parts if not part.unchanged] == [1] * layers * 2


@pytest.mark.parametrize("family", BIASED)
def test_persistent_buffers_are_published_in_their_own_dtype(family: str):
    model = mixture(family).bfloat16()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule(bias.rpartition(".")[0]).e_score_correction_bias = torch.arange(4.0)
    assert WeightFormat(model).buffer_dtypes == {bias: torch.float32}
    assert torch.equal(parameters(model)[bias], torch.arange(4.0))


@pytest.mark.parametrize(
    ("changes", "removed", "message"),
    [
        (
            {"model.layers.0.self_attn.query": 4},
            "model.layers.0.self_attn.q_proj.weight",
            r"1 tensors .*q_proj.*save_p",
        ),
        ({"model.norm.weight": 3}, None, r"model\.norm\.weight \(32,\), the files have \(3,\)"),
    ],
)
def test_a_folder_that_lacks_a_tensor_or_has_another_shape_is_refused_with_the_name(
    tmp_path: Path, changes: dict[str, int], removed: str | None, message: str
):
    save_mixture(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(size) for name, size in changes.items()}
    kept = {name: each for name, each in tensors.items() if name != removed}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        model_shapes(ModelConfig(path=str(tmp_path)))


def test_what_is_pushed_follows_the_folder_where_experts_are_stacked_in_files(tmp_path: Path):
    mixture("qwen3_moe").save_pretrained(tmp_path, save_original_format=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model_shapes(ModelConfig(path=str(tmp_path))).tensors
    assert "model.layers.0.mlp.experts.gate_up_proj" in expected
    assert WeightFormat(loaded).shapes == expected


def test_names_and_shapes_are_read_of_many_files_and_of_pickles(tmp_path: Path):
    model = mixture("mixtral")
    expected = WeightFormat(model).shapes
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert stored_shapes(str(tmp_path / "many")) == expected
    (tmp_path / "pickled").mkdir()
    torch.save(parameters(model), tmp_path / "pickled" / "pytorch_model.bin")
    assert stored_shapes(str(tmp_path / "pickled")) == expected


@pytest.mark.parametrize("fault", ["none", "cut", "index"])
def test_weight_files_that_cannot_be_read_are_refused(tmp_path: Path, fault: str):
    save_mixture(tmp_path, "mixtral")
    weights = tmp_path / "model.safetensors"
    match fault:
        case "none":
            weights.unlink()
        case "cut":
            weights.write_bytes(weights.read_bytes()[:40])
        case "index":
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"nothing": 1}))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        stored_shapes(str(tmp_path))
