"""Implicit process rewards (PRIME): a step's logit is beta * (log pi_phi - log pi_ref), summed over its tokens.

Two causal models with one tokenizer: phi, at the path, and the reference, of which phi is a fine-tuned form. They read
the transcript as it is, special tokens included, for both come from the policy. Source: Cui et al. 2025, "Process
Reinforcement through Implicit Rewards", arXiv 2502.01456; Yuan et al. 2024, arXiv 2412.01981.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.modelling.logprobs import token_logprobs
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.causal import CausalReader
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode, Encoded, LengthLimit, encode_within, tokenize
from asyncrl.scoring.transcript import Transcript

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig


@dataclass(frozen=True)
class Params:
    """`beta` scales the log-ratio; `reference` is the folder or hub name of the reference model."""

    beta: float = 0.05
    reference: str = ""


class ImplicitPRM:
    """The two models. Whoever trains phi changes the weights of `phi.backbone` and the head, and sets `name`."""

    def __init__(
        self, name: str, encode: Encode, phi: CausalReader, reference: CausalReader, beta: float, drop_oldest: bool
    ) -> None:
        self.name = name
        self.phi = phi
        self._encode = encode
        self._reference = reference
        self._beta = beta
        self._drop_oldest = drop_oldest

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """See ProcessRewardModel."""
        limit = LengthLimit(min(self.phi.max_tokens, self._reference.max_tokens), self._drop_oldest, self.name)
        inputs = [encode_within(transcript, self._encode, limit) for transcript in transcripts]
        pairs = zip(self.phi.read(inputs), self._reference.read(inputs), strict=True)
        return [StepScores.of_logits(self._beta * (phi - reference)) for phi, reference in pairs]


def load(config: ScoringModelConfig, params: Params, key: str) -> ImplicitPRM:
    """Phi and its reference. Raises ConfigError: one is no causal model, or they know different tokens."""
    if not params.reference:
        raise ConfigError(f"{key}.params.reference must be set: the model that phi is compared with")
    checkpoint = Checkpoint(config, key)
    other = Checkpoint(replace(config, path=params.reference), f"{key}.params.reference")
    tokenizer = checkpoint.tokenizer()
    if other.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{key}: {checkpoint.name} and its reference {other.name} have different tokenizers")
    phi, reference = (log_prob_reader(each.language_model(), config.micro_tokens) for each in (checkpoint, other))
    drop_oldest = config.long_inputs == "drop_oldest"
    return ImplicitPRM(checkpoint.name, lambda each: encode(each, tokenizer), phi, reference, params.beta, drop_oldest)


def encode(transcript: Transcript, tokenizer: Any) -> Encoded:
    """The transcript as it is; a step is read before each of its tokens, where the token is foretold.

    Raises ScoringError: it begins with a step, whose first token nothing foretells.
    """
    ids, spans = tokenize(transcript, tokenizer)
    if spans and spans[0][0] == 0:
        raise ScoringError("the transcript begins with a step; there must be a prompt before it")
    return Encoded(ids, [range(start - 1, end - 1) for start, end in spans])


def log_prob_reader(model: Any, micro_tokens: int) -> CausalReader:
    """A causal model, read as the log-prob of the token that follows each position."""
    head = model.get_output_embeddings()
    vocabulary = int(head.weight.shape[0])

    def read(hidden: Tensor, following: Tensor) -> Tensor:
        return token_logprobs(hidden, following, head, vocabulary, temperature=1.0, with_entropy=False)[0]

    return CausalReader(model.base_model, read, micro_tokens)
