"""The policy: packed token ids in, their log-probs out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.backbone import Packed, hidden_states, load_model, shard
from asyncrl.learner.ranks import Ranks
from asyncrl.modelling.logprobs import token_logprobs
from asyncrl.modelling.weight_format import WeightFormat


class Policy(nn.Module):
    """Log-probs of packed tokens at `temperature`, of the Hugging Face causal language model `model`, which is not
    sharded yet. `weight_format` converts its weights to what is published.

    Raises ConfigError: see `WeightFormat`.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.weight_format = WeightFormat(model)
        self._temperature = temperature

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.model.config.get_text_config().vocab_size)

    def forward(self, packed: Packed, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs float32[N], each of a token given those before it in its sequence, and entropies float32[N] of
        the distributions they were drawn from, or None. Entries that are not wanted are 0."""
        states = hidden_states(self.model.get_decoder(), packed)
        rows = packed.wanted.nonzero()[:, 0]
        logprobs, entropy = token_logprobs(
            states[rows - 1],
            packed.ids[rows],
            self.model.get_output_embeddings(),
            self.vocabulary,
            self._temperature,
            with_entropy,
        )
        zeros = logprobs.new_zeros(len(packed.ids))
        return zeros.index_put((rows,), logprobs), None if entropy is None else zeros.index_put((rows,), entropy)


def load_policy(config: ModelConfig, temperature: float, ranks: Ranks, length: int) -> Policy:
    """The policy that `config` names, for sequences of at most `length` tokens, sharded over the ranks.

    Raises ConfigError: see `load_model`.
    """
    policy = Policy(load_model(config.path, config, ranks, length), temperature)
    shard(policy, policy.model, config, ranks)
    return policy
