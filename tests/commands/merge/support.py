"""Checkpoints as verl's workers write them, made by one process: of FSDP, and of Megatron."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.commands.demo.tokenizer import build_tokenizer

IDS = torch.arange(1, 33)[None]


def save_template(model: PreTrainedModel, folder: Path) -> None:
    """Save configuration and tokenizer, as verl does in the folder `huggingface`."""
    model.config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(IDS).logits
    return result


def load(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """A model as a user would load it. Nothing may be missing or random."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def save_states(states: list[dict[str, Any]], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / f"model_world_size_{len(states)}_rank_{rank}.pt")
    return folder


def fsdp_states(make: Callable[[], Any], mesh: tuple[int, ...]) -> list[dict[str, Any]]:
    """The state dicts that FSDP2 has on each rank of a mesh: of copies and shards where it has two dimensions."""
    # Torch itself computes a rank's shards. It needs no other ranks for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    states = []
    world = torch.Size(mesh).numel()
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("ddp", "fsdp")[-len(mesh) :])
            model = make()
            for layer in model.get_decoder().layers:
                fully_shard(layer, mesh=device_mesh)
            fully_shard(model, mesh=device_mesh)
            states.append(model.state_dict())
        finally:
            dist.destroy_process_group()
    return states


@dataclass(frozen=True)
class MegatronLayout:
    """The numbers of ranks that share the tensors of layers, and those of experts.

    `homogeneous`: the tensors of all layers, and of all experts, are one each, in which every layer and every expert is
    a chunk, as pipeline and expert parallel ranks write it. Otherwise the numbers of layers are in the names. With
    `halves` (Megatron's singleton local shards) those of experts are too, and gate and up projection have names of
    their own.
    """

    tensor: int = 1
    expert_tensor: int = 1
    homogeneous: bool = True
    halves: bool = False


def save_megatron(model: Any, folder: Path, layout: MegatronLayout) -> Path:
    """A model of Hugging Face as Megatron-Core 0.16 writes it in the format torch_dist."""
    writer = _ChunkWriter(folder)
    for key, whole, cuts in _megatron_tensors(model, layout):
        writer.add(key, whole, cuts)
    writer.add("optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.zeros(3), (1,))
    writer.finish()
    return folder


def _megatron_tensors(model: Any, layout: MegatronLayout) -> Iterator[tuple[str, Tensor, Any]]:
    """Key, whole tensor, and into how many pieces each of its dimensions is cut."""
    config = model.config
    state = {name.removeprefix("model."): each for name, each in model.state_dict().items()}

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.zeros(-len(tensor) % 128, tensor.shape[1])])

    yield "embedding.word_embeddings.weight", padded(state["embed_tokens.weight"]), (layout.tensor, 1)
    yield "decoder.final_layernorm.weight", state["norm.weight"], (1,)
    if not config.tie_word_embeddings:
        yield "output_layer.weight", padded(state["lm_head.weight"]), (layout.tensor, 1)
    layers = [dict(_layer(state, number, config)) for number in range(config.num_hidden_layers)]
    if layout.homogeneous:
        for name in layers[0]:
            cuts = _cuts(name, layers[0][name], layout)
            yield f"decoder.layers.{name}", torch.stack([each[name] for each in layers]), (len(layers), *cuts)
        return
    for number, layer in enumerate(layers):
        for name, tensor in layer.items():
            yield from _apart(f"decoder.layers.{number}.{name}", tensor, _cuts(name, tensor, layout), layout)


def _apart(
    key: str, tensor: Tensor, cuts: tuple[int, ...], layout: MegatronLayout
) -> Iterator[tuple[str, Tensor, Any]]:
    if not layout.halves:
        yield key, tensor, cuts
        return
    experts = ".experts.experts." in key
    for number, own in enumerate(tensor) if experts else ((None, tensor),):
        name = key if number is None else key.replace("experts.experts.", f"experts.experts.{number}.")
        own_cuts = cuts[1:] if experts else cuts
        if "linear_fc1.weight" in key:
            for half, part in zip("wv", own.chunk(2), strict=True):
                yield f"{name}_{half}", part, (own_cuts[0] // 2, *own_cuts[1:])
        else:
            yield name, own, own_cuts


def _cuts(name: str, tensor: Tensor, layout: MegatronLayout) -> tuple[int, ...]:
    experts = ".experts.experts." in name
    ranks = layout.expert_tensor if experts else layout.tensor
    every = (len(tensor),) if experts else ()
    if "layer_norm" in name or "layernorm" in name or "router" in name or "gate_weight" in name or "down_proj" in name:
        return (1,) * tensor.dim()
    if "linear_proj.weight" in name or "linear_fc2" in name:
        return (*every, 1, ranks)
    # Each rank has a piece of the gate and one of the up projection.
    return (*every, ranks * (2 if "linear_fc1" in name else 1), *(1,) * (tensor.dim() - len(every) - 1))


_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.experts.down_proj": "mlp.experts.experts.linear_fc2.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}


def _layer(state: dict[str, Tensor], number: int, config: Any) -> Iterator[tuple[str, Tensor]]:
    prefix = f"layers.{number}."
    own = {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}
    latent = "self_attn.kv_b_proj.weight" in own
    sparse = "mlp.gate.weight" in own
    norm = "pre_mlp_layernorm.weight" if sparse else "mlp.linear_fc1.layer_norm_weight"
    yield norm, own.pop("post_attention_layernorm.weight")
    if latent:
        yield "input_layernorm.weight", own.pop("input_layernorm.weight")
    for kind in () if latent else ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            groups = (own.pop(f"self_attn.{each}_proj.{kind}").chunk(config.num_key_value_heads) for each in "qkv")
            interleaved = [part for group in zip(*groups, strict=True) for part in group]
            yield f"self_attention.linear_qkv.{kind}", torch.cat(interleaved)
    for shared in ("mlp", "mlp.shared_expert", "mlp.shared_experts"):
        if f"{shared}.gate_proj.weight" in own:
            place = "mlp" if shared == "mlp" else "mlp.shared_experts"
            gate, up = (own.pop(f"{shared}.{half}_proj.weight") for half in ("gate", "up"))
            yield f"{place}.linear_fc1.weight", torch.cat([gate, up])
            yield f"{place}.linear_fc2.weight", own.pop(f"{shared}.down_proj.weight")
    for name, tensor in own.items():
        yield _NAMES[name], tensor


class _ChunkWriter:
    """Writes tensors into the files `__RANK_NUMBER.distcp`, whose pieces `.metadata` describes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._described: dict[str, Any] = {}
        self._stored: dict[Any, Any] = {}
        self._plan = SavePlan([])

    def add(self, key: str, whole: Tensor, cuts: tuple[int, ...]) -> None:
        chunks = []
        properties = described.TensorProperties.create_from_tensor(whole)
        for rank, (offsets, piece) in enumerate(_pieces(whole.contiguous(), cuts)):
            name = f"__{rank % 4}_0.distcp"
            with (self._folder / name).open("ab") as file:
                start = file.tell()
                torch.save(piece.clone(), file)
                length = file.tell() - start
            index = described.MetadataIndex(key, offsets, rank)
            self._stored[index] = _StorageInfo(name, start, length)
            chunk = described.ChunkStorageMetadata(torch.Size(offsets), piece.shape)
            data = TensorWriteData(chunk, properties, whole.shape)
            self._plan.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            chunks.append(chunk)
        self._described[key] = described.TensorStorageMetadata(properties, whole.shape, chunks)

    def finish(self) -> None:
        extra = "decoder.layers.self_attention.core_attention._extra_state/shard_0_2"
        self._described[extra] = described.BytesStorageMetadata()
        metadata = described.Metadata(self._described, {}, self._stored, described.StorageMeta(self._folder), "1.0.0")
        metadata.mcore_data = {}  # type: ignore[attr-defined]
        metadata.all_local_plans = [self._plan]  # type: ignore[attr-defined]
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata))
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
        (self._folder / "metadata.json").write_text(json.dumps(backend))
        torch.save({"checkpoint_version": 3.0}, self._folder / "common.pt")


def _pieces(whole: Tensor, cuts: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    sizes = [length // cut for length, cut in zip(whole.shape, cuts, strict=True)]
    assert all(size * cut == length for size, cut, length in zip(sizes, cuts, whole.shape, strict=True)), cuts
    for number in range(torch.Size(cuts).numel()):
        rest, place = number, []
        for cut in reversed(cuts):
            rest, at = divmod(rest, cut)
            place.append(at)
        offsets = tuple(at * size for at, size in zip(reversed(place), sizes, strict=True))
        yield offsets, whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
