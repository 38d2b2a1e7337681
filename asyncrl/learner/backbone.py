"""Hugging Face causal language models over packed sequences: loaded, checked, and sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.attention import PACKED
from asyncrl.learner.gathering import gather, plan_gather
from asyncrl.learner.ranks import Ranks
from asyncrl.published import Published, own_tensors
from asyncrl.weights.buckets import on_host

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences of `lengths` tokens one after the other: ids int64[N], positions int64[N] that restart with each
    sequence, and wanted bool[N], true on the tokens about which something is asked (never the first of a sequence)."""

    ids: Tensor
    positions: Tensor
    wanted: Tensor
    lengths: list[int]

    @staticmethod
    def of(sequences: Sequence[Tensor]) -> Packed:
        """Sequences int64[T] with every token wanted that has one before it."""
        positions = torch.cat([torch.arange(len(each), device=each.device) for each in sequences])
        return Packed(torch.cat(list(sequences)), positions, positions > 0, [len(each) for each in sequences])


def hidden_states(decoder: Any, packed: Packed) -> Tensor:
    """The last hidden states [N, D]; those of a sequence depend on nothing but that sequence."""
    kwargs = {"lengths": packed.lengths} if decoder.config._attn_implementation == PACKED else {}
    output = decoder(input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False, **kwargs)
    states: Tensor = output.last_hidden_state[0]
    return states


def load_model(path: str, config: ModelConfig, ranks: Ranks) -> Any:
    """The causal language model at `path` on the CPU, in the dtype of its files, with attention over packed sequences.

    Raises ConfigError: it cannot be loaded, or cannot be trained packed.
    """
    if config.attention != "sdpa" and ranks.device.type == "cpu":
        raise ConfigError(f"model.attention={config.attention}: training with it needs a GPU; use sdpa")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=config.trust_remote_code)
        ids = torch.arange(12) % model.config.get_text_config().vocab_size
        sequences = [ids[:5], ids[4:]]
        with torch.no_grad():
            alone = torch.cat([model.eval()(input_ids=each[None], use_cache=False).logits[0] for each in sequences])
        model.set_attn_implementation(PACKED if config.attention == "sdpa" else config.attention)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path!r} cannot be loaded with model.attention={config.attention}: {error}") from error
    # The kernels of flash_attention_2 run on a GPU only, and the model is not there yet.
    if config.attention != "flash_attention_2":
        refusal = f"{path!r} cannot be trained packed with model.attention={config.attention}"
        _check_packed(model, sequences, alone, refusal)
    return model


@torch.no_grad()
def _check_packed(model: Any, sequences: Sequence[Tensor], alone: Tensor, refusal: str) -> None:
    """See that packing changes nothing, since an architecture may mix sequences or change its logits afterwards."""
    packed = model.get_output_embeddings()(hidden_states(model.get_decoder(), Packed.of(sequences)))
    theirs, ours = alone.float().log_softmax(-1), packed.float().log_softmax(-1)
    divergence = float((theirs.exp() * (theirs - ours)).sum(-1).max())
    if not divergence < (1e-5 if model.dtype == torch.float32 else 0.05):
        raise ConfigError(f"{refusal}: KL to its own forward is {divergence:.2g}; use another model or attention")


def shard(root: nn.Module, model: Any, config: ModelConfig, ranks: Ranks) -> None:
    """Shard `root`, which holds the Hugging Face `model`, in place: each decoder layer by itself, then the rest.

    Master weights are float32, computation and the weights gathered for it are in `config.dtype`.
    """
    if config.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32)
    for layer in _layers(model):
        # Recomputation asks whether its layer trains; the modules within stay in evaluation mode, without dropout.
        layer.training = config.recompute
        fully_shard(layer.float(), mesh=ranks.mesh, mp_policy=precision)
    fully_shard(root.float(), mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True)


def _layers(model: Any) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def full_tensors(model: nn.Module, published: Published, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """The published tensors of `model` by name, parameters in `dtype`, as copies on rank 0's CPU; empty elsewhere. All
    ranks take part."""
    tensors: dict[str, Tensor] = {}
    for filled in gather(own_tensors(model), plan_gather(published, dtype), published, ranks):
        tensors |= on_host(filled)
    return tensors
