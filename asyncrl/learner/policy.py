"""A Hugging Face causal language model as a policy: packed token ids in, their log-probs out, sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.attention import PACKED
from asyncrl.learner.logprobs import token_logprobs
from asyncrl.learner.ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences of `lengths` tokens one after the other: ids int64[N], positions int64[N] that restart with each
    sequence, and wanted bool[N], true on the tokens whose log-prob is asked for (never the first of a sequence)."""

    ids: Tensor
    positions: Tensor
    wanted: Tensor
    lengths: list[int]

    @staticmethod
    def of(sequences: Sequence[Tensor]) -> Packed:
        """Sequences int64[T] with every token wanted that has one before it."""
        positions = torch.cat([torch.arange(len(each), device=each.device) for each in sequences])
        return Packed(torch.cat(list(sequences)), positions, positions > 0, [len(each) for each in sequences])


class Policy(nn.Module):
    """Log-probs at `temperature` of the packed tokens of a causal language model."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, packed: Packed, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs float32[N], each of a token given those before it in its sequence, and entropies float32[N] of
        the distributions they were drawn from, or None. Entries that are not wanted are 0."""
        kwargs = {"lengths": packed.lengths} if self.model.config._attn_implementation == PACKED else {}
        output = self.model.get_decoder()(
            input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False, **kwargs
        )
        rows = packed.wanted.nonzero()[:, 0]
        logprobs, entropy = token_logprobs(
            output.last_hidden_state[0, rows - 1],
            packed.ids[rows],
            self.model.get_output_embeddings(),
            self.model.config.get_text_config().vocab_size,
            self.temperature,
            with_entropy,
        )
        spread = logprobs.new_zeros(len(packed.ids))
        return spread.index_put((rows,), logprobs), None if entropy is None else spread.index_put((rows,), entropy)


def load_policy(config: ModelConfig, temperature: float, ranks: Ranks) -> Policy:
    """The policy of `config`, sharded over the ranks: float32 master weights, computing in `config.dtype`.

    Raises ConfigError: the model cannot be loaded, or cannot be trained packed.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path, dtype="auto", trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.path!r} cannot be loaded: {error}") from error
    policy = Policy(model.eval(), temperature)
    _use_packed_attention(policy, config)
    shard(policy, model, config, ranks)
    return policy


def _use_packed_attention(policy: Policy, config: ModelConfig) -> None:
    """Choose the attention, and see with two short sequences that packing them changes nothing."""
    model, temperature = policy.model, policy.temperature
    ids = torch.arange(12) % model.config.get_text_config().vocab_size
    sequences = [ids[:5], ids[4:]]
    with torch.no_grad():
        alone = [model(input_ids=each[None], use_cache=False).logits[0, :-1].float() for each in sequences]
        model.set_attn_implementation(PACKED if config.attention == "sdpa" else config.attention)
        if config.attention == "flash_attention_2":
            return  # That kernel runs on a GPU only, and the model is not there yet.
        packed = Packed.of(sequences)
        ours = policy(packed)[0][packed.wanted]
    chosen = zip(alone, sequences, strict=True)
    theirs = torch.cat([(x / temperature).log_softmax(-1).gather(1, y[1:, None])[:, 0] for x, y in chosen])
    error = float((ours - theirs).abs().max())
    if not error < (1e-3 if model.dtype == torch.float32 else 0.2):
        raise ConfigError(
            f"model.path={config.path!r} cannot be trained packed with model.attention={config.attention}: its "
            f"log-probs are off by {error:.2g} (the architecture mixes sequences, or changes its logits afterwards)"
        )


def shard(root: nn.Module, model: Any, config: ModelConfig, ranks: Ranks) -> None:
    """Shard `root`, which holds the Hugging Face `model`, in place: each decoder layer by itself, then the rest."""
    if config.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    dtype = DTYPES[config.dtype]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in _layers(model):
        # Recomputation asks whether its layer trains; the modules within stay in evaluation mode, without dropout.
        layer.training = config.recompute
        fully_shard(layer.float(), mesh=ranks.mesh, mp_policy=precision)
    fully_shard(root.float(), mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True)


def _layers(model: Any) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def full_tensors(model: nn.Module, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """The whole parameters by name, tied ones once, as copies on rank 0's CPU; empty elsewhere. All ranks take part."""
    tensors = {}
    for name, parameter in model.named_parameters():
        sharded = parameter.detach().to(dtype)
        whole = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        if ranks.rank == 0:
            tensors[name] = whole.to("cpu", copy=True)
    return tensors
