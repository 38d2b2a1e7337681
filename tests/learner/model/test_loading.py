from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GemmaConfig, Qwen3Config

from asyncrl.config.schema import CriticConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.ranks import Ranks
from tests.mixtures import MIXTURES, mixture

pytestmark = pytest.mark.slow

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
REMOTE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def tied() -> Any:
    return make(Qwen3Config(tie_word_embeddings=True, **SHAPE, **HEADS))


def make(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def write_tied_twice(folder: Path, difference: float = 0.0) -> None:
    tied().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file(
        {**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + difference}, folder / "model.safetensors"
    )


def write_remote(folder: Path) -> None:
    tied().save_pretrained(folder)
    (folder / "own.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))


def write_without_dtype(folder: Path) -> None:
    tied().bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "dtype"}))


def name_bfloat16(folder: Path) -> None:
    """Have the configuration name another dtype than that of the files."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


def write_wider_than_named(folder: Path) -> None:
    tied().save_pretrained(folder)
    name_bfloat16(folder)


def write_wider_than_named_and_tied_twice(folder: Path) -> None:
    write_tied_twice(folder, 1.0)
    name_bfloat16(folder)


def write_with_frequencies(folder: Path) -> None:
    """Files of an older llama have the rotary frequencies of every layer."""
    tied().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, folder / "model.safetensors")


def write_bin(folder: Path) -> None:
    model = tied()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


BY_SHARD: dict[str, Callable[[Path], object]] = {
    "tied weights": lambda folder: tied().save_pretrained(folder),
    "tied weights in the files twice": write_tied_twice,
    "an untied head": lambda folder: make(Qwen3Config(**SHAPE, **HEADS)).save_pretrained(folder),
    "a scaled embedding": lambda folder: make(GemmaConfig(**SHAPE, **HEADS)).save_pretrained(folder),
    "several files": lambda folder: tied().save_pretrained(folder, max_shard_size=20_000),
    "bfloat16 files": lambda folder: tied().bfloat16().save_pretrained(folder),
    "float32 files of a bfloat16 configuration": write_wider_than_named,
    "files whose dtype the configuration lacks": write_without_dtype,
    "code of its own": write_remote,
    "tensors that no module needs": write_with_frequencies,
    **{family: lambda folder, family=family: mixture(family).save_pretrained(folder) for family in MIXTURES},
}
WHOLE: dict[str, Callable[[Path], object]] = {
    "tied weights that differ": lambda folder: write_tied_twice(folder, 1.0),
    "float32 files of a bfloat16 configuration, tied weights that differ": write_wider_than_named_and_tied_twice,
    "no safetensors": write_bin,
}


@pytest.mark.parametrize("case", [*BY_SHARD, *WHOLE])
def test_weights_and_buffers_are_those_that_transformers_loads_in_float32(
    case: str, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (BY_SHARD | WHOLE)[case](tmp_path)
    config = ModelConfig(str(tmp_path), trust_remote_code=True)
    policy = load_policy(config, 1.0, ranks, 64)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, trust_remote_code=True)
    assert ("each rank loads the whole" in caplog.text) == (case in WHOLE)
    ours = dict(policy.model.named_parameters())
    assert ours.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(ours[name].full_tensor(), parameter), name
    assert type(policy.model) is type(expected)
    buffers = dict(policy.model.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer.float()), name
    assert policy.weight_format.buffer_dtypes == {
        name: buffer.dtype for name, buffer in expected.named_buffers() if name in expected.state_dict()
    }
    assert policy.model.generation_config == expected.generation_config
    critic = load_critic(CriticConfig(), config, ranks, 64)
    assert not any(parameter.full_tensor().any() for parameter in critic.head.parameters())
    for name, parameter in critic.decoder.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected.get_decoder().get_parameter(name).float()), name


def without_head(folder: Path) -> None:
    make(Qwen3Config(**SHAPE, **HEADS)).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors")


def of_another_shape(folder: Path) -> None:
    make(Qwen3Config(**SHAPE, **HEADS)).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "model.norm.weight": torch.ones(31)}, folder / "model.safetensors")


def with_a_broken_index(folder: Path) -> None:
    make(Qwen3Config(**SHAPE, **HEADS)).save_pretrained(folder, max_shard_size=20_000)
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (without_head, "lack 1 tensors of the model, such as lm_head.weight"),
        (of_another_shape, "cannot be loaded"),
        (with_a_broken_index, "cannot be loaded.*weight_map"),
    ],
)
def test_files_that_do_not_hold_the_model_are_refused(
    write: Callable[[Path], None], reason: str, ranks: Ranks, tmp_path: Path
):
    write(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_policy(ModelConfig(str(tmp_path)), 1.0, ranks, 64)


def test_a_critic_needs_no_head_of_a_language_model(ranks: Ranks, tmp_path: Path):
    without_head(tmp_path)
    load_critic(CriticConfig(str(tmp_path)), ModelConfig("unused"), ranks, 64)


def test_a_file_that_is_cut_off_is_an_error_with_the_path(ranks: Ranks, tmp_path: Path):
    tied().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(ModelConfig(str(tmp_path)), 1.0, ranks, 64)
