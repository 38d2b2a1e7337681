"""Megatron's distributed checkpoints become the model that its ranks had."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.merge.command import merge
from tests.families import family_model
from tests.merge.support import MegatronLayout, load, logits, save_megatron, save_template
from tests.merge.test_shards import _Runs

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one rank": MegatronLayout(),
    "stacked layers": MegatronLayout(tensor=2, expert_tensor=2),
    "numbered layers": MegatronLayout(tensor=2, expert_tensor=4, homogeneous=False),
    "halves apart": MegatronLayout(tensor=2, expert_tensor=1, homogeneous=False, halves=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3 tied", "mistral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_a_distributed_checkpoint_becomes_the_model_that_its_ranks_had(
    family: str, layout: str, tmp_path: Path
) -> None:
    if family == "deepseek_v3" and LAYOUTS[layout].homogeneous:
        pytest.skip("its first layers are dense, so Megatron numbers the layers")
    model = family_model(family, 1)
    save_megatron(model, tmp_path / "actor" / "model" / "dist_ckpt", LAYOUTS[layout])
    save_template(model, tmp_path / "actor" / "model" / "huggingface")
    merge(tmp_path / "actor", tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(model))


def test_the_output_layer_can_be_the_embedding(tmp_path: Path) -> None:
    model = family_model("llama", 1)
    save_megatron(model, tmp_path / "dist_ckpt", MegatronLayout(tensor=2))
    save_template(model, tmp_path / "huggingface")
    merge(tmp_path, tmp_path / "merged", tied=True)
    merged = load(tmp_path / "merged")
    assert merged.config.tie_word_embeddings
    model.lm_head.weight = model.model.embed_tokens.weight
    assert torch.equal(logits(merged), logits(model))


def test_metadata_that_names_other_classes_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    model = family_model("llama", 1)
    save_megatron(model, tmp_path / "dist_ckpt", MegatronLayout())
    save_template(model, tmp_path / "huggingface")
    (tmp_path / "dist_ckpt" / ".metadata").write_bytes(pickle.dumps(_Runs(str(tmp_path / "called"))))
    with pytest.raises(CheckpointError, match=r"names posix.mkdir.*not unpickled"):
        merge(tmp_path, tmp_path / "merged")
    assert not (tmp_path / "called").exists()


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    save_megatron(family_model("llama", 1), tmp_path / "dist_ckpt", MegatronLayout(tensor=2))
    save_template(family_model("gemma2", 1), tmp_path / "huggingface")
    with pytest.raises(CheckpointError, match="names for a gemma2 are not known; those of llama"):
        merge(tmp_path, tmp_path / "merged")
    save_template(family_model("llama", 1), tmp_path / "huggingface")
    (tmp_path / "dist_ckpt" / "__1_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot be read from .*__1_0.distcp"):
        merge(tmp_path, tmp_path / "merged")
    (tmp_path / "dist_ckpt" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="format 'zarr', of which only torch_dist"):
        merge(tmp_path, tmp_path / "merged")
