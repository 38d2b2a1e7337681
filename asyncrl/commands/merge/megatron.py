"""Maps the tensors of a Megatron GPT model to Hugging Face tensors.

Megatron stacks tensors that Hugging Face stores separately. One tensor may hold all layers, or all experts of a layer.
A tensor of a single layer or expert has the number in its name.

For each query group, `linear_qkv` holds the queries, the key and the value. `linear_fc1` holds the gate and the up
projection. A norm may be part of the linear layer after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.commands.merge.distributed import DistributedTensors
from asyncrl.errors import CheckpointError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3")
"""The values of `model_type` that can be merged."""

_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_SAME_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.weight(?:_[wv])?)")
_FEED_FORWARD = re.compile(r"linear_fc([12])\.weight(?:_([wv]))?")
_SHARED = "mlp.shared_experts."
_OPTIMIZER = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A Hugging Face tensor of one layer. `name` is the part of its name after the layer number."""

    name: str
    tensor: Tensor


class MegatronNames:
    """Maps the tensors of a model with the Hugging Face configuration `config`.

    Raises CheckpointError: the model type is not in `FAMILIES`.
    """

    def __init__(self, config: Any) -> None:
        if config.model_type not in FAMILIES:
            raise CheckpointError(
                f"Megatron's tensors of a {config.model_type} cannot be merged, only those of {', '.join(FAMILIES)}"
            )
        self._config = config
        self._shared = "mlp.shared_expert" if config.model_type == "qwen2_moe" else "mlp.shared_experts"

    def read(self, stored: DistributedTensors, tied: bool) -> dict[str, Tensor]:
        """The tensors of a checkpoint by Hugging Face names. With `tied` the output layer is left out.

        Raises CheckpointError: a tensor is unknown or cannot be read.
        """
        named: dict[str, Tensor] = {}
        for key in sorted(stored.shapes()):
            if key.startswith(_OPTIMIZER) or key.endswith("_extra_state") or (tied and key == "output_layer.weight"):
                continue
            for name, tensor in self._named(key, stored.read(key)):
                if name in named:
                    raise CheckpointError(f"two tensors of the checkpoint become {name}; one is {key}")
                named[name] = tensor
        return named

    def _named(self, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if key in _OUTER:
            yield self._outer(key, tensor)
            return
        match = _LAYER.fullmatch(key)
        if match is None:
            raise CheckpointError(f"the tensor {key} of Megatron has no Hugging Face name")
        number, rest = match.groups()
        layers = enumerate(tensor) if number is None else ((int(number), tensor),)
        for layer, own in layers:
            for piece in self._pieces(rest, own):
                yield f"model.layers.{layer}.{piece.name}", piece.tensor

    def _outer(self, key: str, tensor: Tensor) -> tuple[str, Tensor]:
        if key == "output_layer.weight" and len(tensor) == 1 != self._config.vocab_size:
            return "score.weight", tensor
        # Megatron pads the vocabulary to a multiple of its ranks.
        rows = len(tensor) if key == "decoder.final_layernorm.weight" else self._config.vocab_size
        return _OUTER[key], tensor[:rows]

    def _pieces(self, rest: str, tensor: Tensor) -> Iterator[_Piece]:
        if rest in _SAME_IN_LAYER:
            yield _Piece(_SAME_IN_LAYER[rest], tensor)
        elif match := _QKV.fullmatch(rest):
            yield from self._attention(match[1], tensor)
        elif match := _EXPERT.fullmatch(rest):
            experts = enumerate(tensor) if match[1] is None else ((int(match[1]), tensor),)
            for expert, own in experts:
                yield from _feed_forward(match[2], f"mlp.experts.{expert}", own)
        elif rest == f"{_SHARED}gate_weight":
            yield _Piece("mlp.shared_expert_gate.weight", tensor)
        elif rest.startswith(_SHARED) and _FEED_FORWARD.fullmatch(rest.removeprefix(_SHARED)):
            yield from _feed_forward(rest.removeprefix(_SHARED), self._shared, tensor)
        elif rest.startswith("mlp.") and _FEED_FORWARD.fullmatch(rest.removeprefix("mlp.")):
            yield from _feed_forward(rest.removeprefix("mlp."), "mlp", tensor)
        else:
            raise CheckpointError(f"the tensor {rest} of Megatron's layers has no Hugging Face name")

    def _attention(self, kind: str, tensor: Tensor) -> Iterator[_Piece]:
        heads, groups = self._config.num_attention_heads, self._config.num_key_value_heads
        of_group = heads // groups + 2
        if len(tensor) % (groups * of_group):
            raise CheckpointError(
                f"a linear_qkv of {len(tensor)} rows is not {heads} queries and {groups} keys and values"
            )
        grouped = tensor.view(groups, of_group, -1, *tensor.shape[1:])
        for name, part in zip("qkv", grouped.split([of_group - 2, 1, 1], dim=1), strict=True):
            yield _Piece(f"self_attn.{name}_proj.{kind}", part.flatten(0, 2))


def _feed_forward(name: str, prefix: str, tensor: Tensor) -> Iterator[_Piece]:
    """The projections in Megatron's tensor `name`: linear_fc1.weight, a half of that tensor, or linear_fc2.weight."""
    match = _FEED_FORWARD.fullmatch(name)
    assert match is not None, name
    layer, half = match.groups()
    if layer == "2":
        yield _Piece(f"{prefix}.down_proj.weight", tensor)
        return
    halves = {"w": "gate_proj", "v": "up_proj"}
    parts = {half: tensor} if half else dict(zip(halves, torch.chunk(tensor, 2), strict=True))
    for each, part in parts.items():
        yield _Piece(f"{prefix}.{halves[each]}.weight", part)
