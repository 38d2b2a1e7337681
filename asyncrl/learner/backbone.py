"""Hugging Face causal language models over packed sequences: loaded, checked, and sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.gathering import gather, plan_gather
from asyncrl.learner.ranks import Ranks
from asyncrl.modelling.attention import PACKED, check_positions, check_same_logits, inspect_attention
from asyncrl.modelling.weight_format import WeightFormat, model_tensors
from asyncrl.weights.buckets import on_host

LONGEST_PROBE = 256
"""Tokens of a window up to which a model is tried beyond it: what a pass over twice as many costs at the start."""

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


def load_model(path: str, config: ModelConfig, ranks: Ranks, length: int) -> Any:
    """The causal language model at `path` on the CPU, in the dtype of its files, with attention over packed sequences
    of at most `length` tokens each.

    Raises ConfigError: it cannot be loaded, or cannot be trained packed.
    """
    if config.attention != "sdpa" and ranks.device.type == "cpu":
        raise ConfigError(f"model.attention={config.attention}: training with it needs a GPU; use sdpa")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=config.trust_remote_code)
        _attend_packed(model.eval(), config.attention, length)
    except ConfigError as error:
        raise ConfigError(
            f"{path!r} cannot be trained packed with model.attention={config.attention}: {error}; "
            "use another model or attention"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path!r} cannot be loaded with model.attention={config.attention}: {error}") from error
    return model


def _attend_packed(model: Any, attention: str, length: int) -> None:
    check_positions(model.config, length)
    plain = model.config._attn_implementation
    # Only flex attention builds masks; transformers gives soft caps and sinks to the kernels of flash attention.
    allowed = () if attention == "sdpa" else ("softcap", "s_aux")
    found = [] if attention == "flex_attention" else inspect_attention(model, length, allowed)
    if not isinstance(model.get_decoder(), PreTrainedModel) or model.get_decoder() is model:
        raise ConfigError("its decoder cannot be run without its head")
    narrowest = min((each.window for each in found if each.window is not None), default=0)
    sequences = _probes(model.config.get_text_config().vocab_size, narrowest)
    model.set_attn_implementation(plain)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in sequences])
    model.set_attn_implementation(PACKED if attention == "sdpa" else attention)
    # The kernels of flash_attention_2 run on a GPU only, and the model is not there yet.
    if attention != "flash_attention_2":
        _check_packed(model, sequences, alone)


def _probes(vocabulary: int, window: int) -> list[Tensor]:
    """Two sequences of other tokens and lengths, longer than the window where that is not expensive."""
    lengths = (window + 5, window + 8) if window <= LONGEST_PROBE else (5, 8)
    ids = torch.arange(sum(lengths)) * 7 % vocabulary
    return list(ids.split(lengths))


@torch.no_grad()
def _check_packed(model: Any, sequences: Sequence[Tensor], alone: Tensor) -> None:
    """See that packing changes nothing, since an architecture may mix sequences or change its logits afterwards."""
    packed = model.get_output_embeddings()(hidden_states(model.get_decoder(), Packed.of(sequences)))
    check_same_logits(alone, packed, model.dtype, "it caps or scales its logits, or mixes sequences")


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


def full_tensors(model: nn.Module, published: WeightFormat, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """The published tensors of `model` by name, parameters in `dtype`, as copies on rank 0's CPU; empty elsewhere. All
    ranks take part."""
    tensors: dict[str, Tensor] = {}
    for filled in gather(model_tensors(model), plan_gather(published, dtype), published, ranks):
        tensors |= on_host(filled)
    return tensors
