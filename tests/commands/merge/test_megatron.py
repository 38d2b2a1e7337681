"""Megatron's distributed checkpoints become the model that its ranks had."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as described

from asyncrl.commands.merge.merge import merge
from asyncrl.errors import CheckpointError
from tests.commands.merge.support import MegatronLayout, load, logits, save_megatron, save_template
from tests.commands.merge.test_shards import _Runs
from tests.families import family_model

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


def test_metadata_cannot_change_the_classes_of_which_it_consists(tmp_path: Path) -> None:
    save_megatron(family_model("llama", 1), tmp_path / "dist_ckpt", MegatronLayout())
    save_template(family_model("llama", 1), tmp_path / "huggingface")
    # A class, and a dict of attributes for it: the method of paths that says where files are written.
    given = b"\x80\x02cpathlib\nPosixPath\nN}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86b."
    (tmp_path / "dist_ckpt" / ".metadata").write_bytes(given)
    with pytest.raises(CheckpointError, match=r"sets attributes of .*PurePosixPath"):
        merge(tmp_path, tmp_path / "merged")
    assert PurePosixPath("a/b").name == "b"


def _first_twice(chunks: list[Any]) -> None:
    chunks[1] = chunks[0]


def _one_lacks(chunks: list[Any]) -> None:
    chunks.pop()


def _moved_by(rows: int) -> Callable[[list[Any]], None]:
    def move(chunks: list[Any]) -> None:
        last = chunks[-1]
        chunks[-1] = described.ChunkStorageMetadata(torch.Size([last.offsets[0] + rows, 0]), last.sizes)

    return move


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_first_twice, "lack a part"),
        (_one_lacks, "lack a part"),
        (_moved_by(-8), "lack a part"),
        (_moved_by(8), "outside"),
    ],
)
def test_chunks_that_do_not_cover_a_tensor_once_are_refused(
    change: Callable[[list[Any]], None], message: str, tmp_path: Path
) -> None:
    save_megatron(family_model("llama", 1), tmp_path / "dist_ckpt", MegatronLayout(tensor=2))
    save_template(family_model("llama", 1), tmp_path / "huggingface")
    path = tmp_path / "dist_ckpt" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301
    change(metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        merge(tmp_path, tmp_path / "merged")


def test_any_values_in_metadata_are_refused_by_the_name_of_their_tensor(tmp_path: Path) -> None:
    save_megatron(family_model("llama", 1), tmp_path / "dist_ckpt", MegatronLayout(tensor=2))
    save_template(family_model("llama", 1), tmp_path / "huggingface")
    path = tmp_path / "dist_ckpt" / ".metadata"
    good, key = path.read_bytes(), "embedding.word_embeddings.weight"

    def refused(change: Callable[[Any], None], message: str) -> None:
        metadata = pickle.loads(good)  # noqa: S301
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=message):
            merge(tmp_path, tmp_path / "merged")

    def stored(name: str, value: Any) -> Callable[[Any], None]:
        def change(found: Any) -> None:
            for each in found.storage_data.values():
                setattr(each, name, value)

        return change

    for name, value in (("offset", "a"), ("length", 1 << 60), ("relative_path", 3), ("relative_path", "../x")):
        refused(stored(name, value), "layernorm.weight")
    refused(lambda found: setattr(found.state_dict_metadata[key], "size", torch.Size([1 << 62, 64])), key)
    refused(
        lambda found: setattr(found.state_dict_metadata[key].properties, "dtype", torch.int8), "tensor has torch.int8"
    )
    refused(lambda found: setattr(found, "storage_data", 3), "cannot be read")


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    save_megatron(family_model("llama", 1), tmp_path / "dist_ckpt", MegatronLayout(tensor=2))
    save_template(family_model("gemma2", 1), tmp_path / "huggingface")
    with pytest.raises(CheckpointError, match="tensors of a gemma2 cannot be merged, only those of llama"):
        merge(tmp_path, tmp_path / "merged")
    save_template(family_model("llama", 1), tmp_path / "huggingface")
    (tmp_path / "dist_ckpt" / "__1_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot be read from .*__1_0.distcp"):
        merge(tmp_path, tmp_path / "merged")
    (tmp_path / "dist_ckpt" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="format 'zarr'; only torch_dist"):
        merge(tmp_path, tmp_path / "merged")
