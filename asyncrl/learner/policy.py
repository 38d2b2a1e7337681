"""The policy: packed token ids in, their log-probs out. A Hugging Face causal language model, loaded, checked, and
sharded with FSDP2; the critic is loaded in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.packing import PackedSequences
from asyncrl.learner.ranks import Ranks
from asyncrl.modelling.attention import check_positions, check_same_logits, inspect_attention
from asyncrl.modelling.logprobs import token_logprobs
from asyncrl.modelling.packed_attention import PACKED
from asyncrl.modelling.weight_format import WeightFormat
from asyncrl.weights.manifest import DTYPES

LONGEST_PROBE = 256
"""Attention windows of up to so many tokens are tried at the start with sequences that are longer."""


class Policy(nn.Module):
    """Log-probs of packed tokens at `temperature`, of the Hugging Face causal language model `model`, which is not
    sharded yet. `weight_format` converts its weights to what is published.

    Raises ConfigError: see `WeightFormat`.
    """

    def __init__(self, model: Any, temperature: float, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.weight_format = WeightFormat(model)
        self._temperature = temperature
        self._compiled = compiled

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a pass may compute a prefix once that several sequences share."""
        return bool(self.model.config._attn_implementation == PACKED)

    def forward(self, packed: PackedSequences, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs float32[N], each of a token given those before it in its sequence, and entropies float32[N] of
        the distributions they were drawn from, or None. Both are 0 on tokens that are not needed."""
        states = hidden_states(self.model.get_decoder(), packed)
        head, targets = self.model.get_output_embeddings(), packed.ids[packed.needed]
        logprobs, entropy = token_logprobs(
            states[packed.before], targets, head, self._temperature, with_entropy, self._compiled
        )
        return packed.spread(logprobs), None if entropy is None else packed.spread(entropy)


def load_policy(config: ModelConfig, temperature: float, ranks: Ranks, length: int) -> Policy:
    """The policy that `config` names, for sequences of at most `length` tokens, sharded over the ranks.

    Raises ConfigError: see `load_model`.
    """
    policy = Policy(load_model(config.path, config, ranks, length), temperature, compiles(config, ranks.device))
    shard(policy, policy.model, config, ranks)
    return policy


def hidden_states(decoder: Any, packed: PackedSequences) -> Tensor:
    """The last hidden states [U, D]; those of a sequence depend on nothing but that sequence."""
    kwargs = {"layout": packed.layout} if decoder.config._attn_implementation == PACKED else {}
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
    model = read_model(path, config)
    try:
        _attend_packed(model, config.attention, length)
    except ConfigError as error:
        raise ConfigError(
            f"{path!r} cannot be trained packed with model.attention={config.attention}: {error}; "
            "use another model or attention"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path!r} cannot be loaded with model.attention={config.attention}: {error}") from error
    return model


def read_model(path: str, config: ModelConfig) -> Any:
    """The causal language model at `path` on the CPU, in the dtype of its files. Raises ConfigError: it cannot be
    loaded."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path!r} cannot be loaded: {error}") from error
    return model.eval()


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
    """Two sequences of different tokens and lengths, longer than the window where that is not expensive."""
    lengths = (window + 5, window + 8) if window <= LONGEST_PROBE else (5, 8)
    ids = torch.arange(sum(lengths)) * 7 % vocabulary
    return list(ids.split(lengths))


@torch.no_grad()
def _check_packed(model: Any, sequences: Sequence[Tensor], alone: Tensor) -> None:
    """Check that packing changes nothing: an architecture may mix sequences, or change its logits after the head."""
    packed = model.get_output_embeddings()(hidden_states(model.get_decoder(), PackedSequences.of(sequences)))
    check_same_logits(alone, packed, model.dtype, "it caps or scales its logits, or mixes sequences")


def compiles(config: ModelConfig, device: torch.device) -> bool:
    """Whether layers, and what follows the logits, are compiled."""
    return device.type == "cuda" if config.compile is None else config.compile


def shard(root: nn.Module, model: Any, config: ModelConfig, ranks: Ranks) -> None:
    """Shard `root`, which holds the Hugging Face `model`, in place: each decoder layer by itself, then the rest.

    Master weights are float32, computation and the weights gathered for it are in `config.dtype`. A layer is compiled
    and recomputed without the hooks of FSDP, which stay outside.
    """
    compiled = compiles(config, ranks.device)
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32)
    layers = set(model._no_split_modules or ())
    for layer in [module for module in model.modules() if type(module).__name__ in layers]:
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if config.recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(layer.float(), mesh=ranks.mesh, mp_policy=precision)
    fully_shard(root.float(), mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True)
