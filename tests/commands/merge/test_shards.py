"""verl's FSDP shards become the model that its ranks had."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from asyncrl.commands.merge.merge import merge
from asyncrl.commands.merge.shards import FsdpShards, shard_files
from asyncrl.errors import CheckpointError, ConfigError
from tests.commands.merge.support import fsdp_states, load, logits, save_states, save_template
from tests.families import family_model
from tests.vision import PATCH, VISION_FAMILIES, save_vision_model, vision_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen3", "llama tied", "qwen3_moe"])
@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_the_dtensors_of_all_ranks_become_the_model_that_they_had(
    family: str, mesh: tuple[int, ...], tmp_path: Path
) -> None:
    model = family_model(family, 1)
    expected = logits(model)
    source = save_states(fsdp_states(lambda: family_model(family, 1), mesh), tmp_path / "actor")
    save_template(model, source / "huggingface")
    merge(source, tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer("1+2").input_ids


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("names", ["in memory", "in files"])
def test_shards_of_models_that_read_images_become_folders_with_their_towers_and_processors(
    family: str, names: str, tmp_path: Path
) -> None:
    """The names in files are those in memory of an older transformers, where Qwen-VL's differ."""
    template = save_vision_model(tmp_path / "template", family)
    files = load_file(template / "model.safetensors")
    (template / "model.safetensors").unlink()
    model = vision_model(family)
    if names == "in memory":
        states = fsdp_states(lambda: vision_model(family), (3,))
    else:
        states = [{name: _rows(each)[rank].clone() for name, each in files.items()} for rank in (0, 1)]
    source = save_states(states, tmp_path / "actor")
    template.rename(source / "huggingface")
    merge(source, tmp_path / "merged")
    merged = load(tmp_path / "merged", AutoModelForImageTextToText).state_dict()
    assert merged.keys() == model.state_dict().keys()
    assert all(torch.equal(merged[name], each) for name, each in model.state_dict().items())
    assert AutoImageProcessor.from_pretrained(tmp_path / "merged", backend="pil").patch_size == PATCH


def _copies(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor, tensor]


def _rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    half = (len(tensor) + 1) // 2
    return [tensor[:half], tensor[half:]]


def _flat(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.flatten()[:7], tensor.flatten()[7:]]


def _all_on_one(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(0), tensor.flatten()]


def _save_plain(model: Any, folder: Path, split: Any) -> Path:
    parts = {name: split(each) for name, each in model.state_dict().items()}
    source = save_states([{name: each[rank].clone() for name, each in parts.items()} for rank in (0, 1)], folder)
    save_template(model, source / "huggingface")
    return source


@pytest.mark.parametrize("split", [_copies, _rows, _flat, _all_on_one])
def test_plain_tensors_are_merged_whether_ranks_have_copies_rows_or_elements(split: Any, tmp_path: Path) -> None:
    model = family_model("qwen2", 1)
    merge(_save_plain(model, tmp_path / "actor", split), tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(model))


def test_experts_may_have_the_names_of_an_older_transformers(tmp_path: Path) -> None:
    model = family_model("qwen3_moe", 1)
    state = {name: each for name, each in model.state_dict().items() if ".experts." not in name}
    for name, stacked in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(each.chunk(2) for each in stacked):
                place = f"{name.removesuffix('gate_up_proj')}{expert}"
                state |= {f"{place}.gate_proj.weight": gate.clone(), f"{place}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            state |= {
                f"{name.removesuffix('down_proj')}{expert}.down_proj.weight": each.clone()
                for expert, each in enumerate(stacked)
            }
    source = save_states([state], tmp_path / "actor")
    save_template(model, source / "huggingface")
    merge(source, tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(model))


def test_a_critic_keeps_its_value_head(tmp_path: Path) -> None:
    config = family_model("qwen3", 1).config
    config.num_labels = 1
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32).eval()
    source = _save_plain(critic, tmp_path / "critic", _rows)
    merge(source, tmp_path / "merged")
    merged = load(tmp_path / "merged", AutoModelForTokenClassification)
    assert merged.config.num_labels == 1
    assert torch.equal(logits(merged), logits(critic))


def test_weights_are_rounded_only_when_a_dtype_is_asked_for(tmp_path: Path) -> None:
    model = family_model("qwen3", 1)
    model.config.dtype = "bfloat16"
    source = _save_plain(model, tmp_path / "actor", _copies)
    merge(source, tmp_path / "kept")
    merge(source, tmp_path / "rounded", dtype="bfloat16")
    assert load(tmp_path / "kept").dtype == torch.float32
    assert load(tmp_path / "rounded").dtype == torch.bfloat16


def test_tied_tensors_that_differ_need_a_decision(tmp_path: Path) -> None:
    model = family_model("qwen3 tied", 1)
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    source = save_states([state], tmp_path / "actor")
    save_template(model, source / "huggingface")
    with pytest.raises(CheckpointError, match=r"lm_head.weight and .* have different values.*--tie-word-embedding"):
        merge(source, tmp_path / "merged")
    merge(source, tmp_path / "merged", tied=True)
    assert torch.equal(logits(load(tmp_path / "merged")), logits(model))


def test_a_head_that_shares_its_values_with_the_embedding_is_written_where_the_configuration_ties_nothing(
    tmp_path: Path,
) -> None:
    model = family_model("qwen3", 1)
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    source = save_states([state], tmp_path / "actor")
    save_template(model, source / "huggingface")
    merge(source, tmp_path / "merged")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert torch.equal(logits(load(tmp_path / "merged")), logits(model))


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_the_file_of_one_rank_in_the_place_of_another_is_refused(mesh: tuple[int, ...], tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
    states = [
        {name: each for name, each in state.items() if name in names}
        for state in fsdp_states(lambda: family_model("qwen3", 1), mesh)
    ]
    source = save_states(states, tmp_path / "actor")
    merged = FsdpShards(shard_files(source)).merge({})
    assert torch.equal(merged[names[0]], family_model("qwen3", 1).state_dict()[names[0]])
    for last in range(1, len(states), 2):
        shutil.copy(source / f"model_world_size_{len(states)}_rank_0.pt", shard_files(source)[last])
    with pytest.raises(CheckpointError, match="was probably copied over"):
        FsdpShards(shard_files(source)).merge({})


def test_a_configuration_that_cannot_be_used_is_refused_and_its_code_is_not_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = family_model("qwen3", 1)
    source = save_states([model.state_dict()], tmp_path / "actor")
    save_template(model, source / "huggingface")
    path = source / "huggingface" / "config.json"
    good = json.loads(path.read_text())
    code = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_unheard_of.C"}}
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    for change in (code, fp8, {"hidden_size": "64"}, {"hidden_size": -1}, {"num_attention_heads": 0}, {"dtype": "no"}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match=r"from this configuration|the configuration in"):
            merge(source, tmp_path / "merged")
    assert "run the custom code" not in capsys.readouterr().out


def test_the_result_may_be_where_a_link_leads(tmp_path: Path) -> None:
    model = family_model("qwen3", 1)
    source = _save_plain(model, tmp_path / "actor", _copies)
    (tmp_path / "disk").mkdir(mode=0o755)
    (tmp_path / "merged").symlink_to(tmp_path / "disk")
    merge(source, tmp_path / "merged")
    assert (tmp_path / "merged").is_symlink()
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in (tmp_path / "disk").iterdir())
    assert torch.equal(logits(load(tmp_path / "disk")), logits(model))


class _Runs:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_shards_that_name_other_classes_are_refused_and_call_nothing(tmp_path: Path) -> None:
    source = save_states([{"a": _Runs(str(tmp_path / "called"))}], tmp_path / "actor")
    save_template(family_model("qwen3", 1), source / "huggingface")
    with pytest.raises(CheckpointError, match="these are not unpickled"):
        merge(source, tmp_path / "merged")
    assert [path for path in tmp_path.iterdir() if path != source] == []


def test_what_does_not_fit_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    model = family_model("qwen3", 1)
    source = _save_plain(model, tmp_path / "actor", _rows)
    whole = dict(model.state_dict())
    refused: list[tuple[list[dict[str, Any]], str]] = [
        ([{**whole, "other": torch.ones(2)}], "1 tensors that its configuration does not have, such as other"),
        ([{name: each for name, each in whole.items() if name != "model.norm.weight"}], "lacks model.norm.weight"),
        ([{**whole, "model.norm.weight": torch.ones(3)}], "which do not make"),
        (
            [whole, {**whole, "model.norm.weight": torch.rand(64)}],
            "the copies of model.norm.weight on the ranks have different values",
        ),
        ([{**whole, "base_model.q_proj.lora_A.default.weight": torch.ones(2)}], "LoRA adapters"),
        ([{**whole, 3: torch.ones(2)}], "not a state dict of tensors"),  # type: ignore[dict-item]
        ([whole, {**whole, "model.norm.weight": torch.rand(64).half()}], "of torch.float16 and torch.float32 on diff"),
        (
            [{**whole, "model.norm.weight": torch.ones(64, dtype=torch.int8)}],
            "the dtype torch.int8, perhaps of quantised",
        ),
        ([{**whole, "model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}], "perhaps of quantised weights"),
        ([{**whole, "model.norm.weight": torch.ones(64).to_sparse()}], "sparse_coo.*only dense values"),
        ([{**whole, "model.norm.weight": torch.ones(64, device="meta")}], "on meta: only dense values"),
    ]
    for number, (states, match) in enumerate(refused):
        folder = save_states(states, tmp_path / str(number))
        with pytest.raises(CheckpointError, match=match):
            merge(folder, tmp_path / "merged", config=source / "huggingface")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigError, match="--config"):
        merge(tmp_path / "0", tmp_path / "merged")
    (source / "model_world_size_2_rank_00.pt").touch()
    with pytest.raises(CheckpointError, match=r"the shards of 3 ranks instead of 2: .*_rank_0.pt, .*_rank_00.pt"):
        merge(source, tmp_path / "merged")
    (source / "model_world_size_2_rank_00.pt").unlink()
    (source / "model_world_size_2_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shards of ranks \[0\] of 2"):
        merge(source, tmp_path / "merged")
