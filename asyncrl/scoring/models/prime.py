"""Implicit process rewards (PRIME): scores of steps from a model phi that was trained only on outcomes. A step's logit
is the sum of beta * (log pi_phi - log pi_ref) over the step's tokens, where pi is a model's probability of the token.

There are two causal models with the same tokenizer. `phi` is the model at the configured path, and `ref` is the model
from which phi was fine-tuned. Both must know the policy's chat template, since they read the policy's text with
its special tokens.

Source: Cui et al. 2025, "Process Reinforcement through Implicit Rewards", arXiv 2502.01456; Yuan et al. 2024, arXiv
2412.01981.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from asyncrl.config.option import option
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.modelling.logprobs import token_logprobs
from asyncrl.scoring.models.causal import CausalPRM, CausalReader
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encoded, tokenize
from asyncrl.scoring.transcript import Transcript


@dataclass(frozen=True)
class Params:
    reference: str = option(..., "the folder or hub name of the model that phi is compared with")
    beta: float = option(0.05, "scales the log-ratio")


def load(config: ScoringModelConfig, params: Params, key: str) -> CausalPRM:
    """Phi and its reference. Raises ConfigError: one of them is not causal, or their tokenizers differ."""
    checkpoint = Checkpoint(config, key)
    other = Checkpoint(replace(config, path=params.reference), f"{key}.params.reference")
    tokenizer = checkpoint.tokenizer()
    if other.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{key}: {checkpoint.name} and its reference {other.name} have different tokenizers")
    phi, reference = (_log_prob_reader(each.language_model(), config) for each in (checkpoint, other))

    def encode(transcript: Transcript) -> Encoded:
        """Encode so that a step is read at the positions that predict its tokens."""
        ids, spans = tokenize(transcript, tokenizer)
        if spans and spans[0][0] == 0:
            raise ScoringError("the transcript begins with a step; there must be a prompt before it")
        return Encoded(ids, [range(start - 1, end - 1) for start, end in spans])

    return CausalPRM(checkpoint, encode, {phi: params.beta, reference: -params.beta})


def _log_prob_reader(model: Any, config: ScoringModelConfig) -> CausalReader:
    head = model.get_output_embeddings()

    def read(hidden: Tensor, following: Tensor) -> Tensor:
        device = head.weight.device
        return token_logprobs(hidden.to(device), following.to(device), head, temperature=1.0, with_entropy=False)[0]

    return CausalReader(model.base_model, read, config.micro_tokens, micro_inputs=config.micro_inputs)
