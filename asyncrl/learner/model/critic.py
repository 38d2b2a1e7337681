"""The critic maps packed token ids to the value of the state before each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from asyncrl.algorithms.metrics import moments
from asyncrl.config.schema import CriticConfig, ModelConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.activations import Activations
from asyncrl.learner.model.lora import with_adapters
from asyncrl.learner.model.packed_check import hidden_states
from asyncrl.learner.model.policy import load_sharded, open_decoder
from asyncrl.learner.model.value_head import new_value_head, values_of
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.freezing import freeze
from asyncrl.modelling.opening import beside
from asyncrl.modelling.routers import route_in_float32


class Critic(nn.Module):
    """Computes values of packed tokens by a Hugging Face decoder and a linear `head`. Without a `head`, makes one whose
    weights are 0."""

    activations: Activations
    """The activations that the layers keep for the backward pass. `load_critic` sets them."""

    def __init__(self, decoder: Any, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        route_in_float32(decoder)
        self.head = nn.Linear(decoder.config.get_text_config().hidden_size, 1) if head is None else head
        if head is None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, packed: PackedSequences) -> Tensor:
        """Return values float32[N]: the value of the state in which each needed token was sampled, and 0 for the other
        tokens."""
        states = hidden_states(self.decoder, packed)[packed.sources]
        return packed.spread(values_of(self.head, states))


def load_critic(config: CriticConfig, model: ModelConfig, ranks: Ranks, length: int, seed: int = 0) -> Critic:
    """Load the critic that `config` names, for sequences of at most `length` tokens, sharded over the ranks. `seed`
    decides the values with which new adapters begin.

    Raises ConfigError: see `open_decoder`, `freeze`, `with_adapters`, `new_value_head` and `load_sharded`.
    """
    model = beside(model, config.path)
    stored = open_decoder(model, ranks, length, with_head=False)
    freeze(stored.model, config.freeze, "critic.freeze", may_be_all=True)
    stored = with_adapters(stored, config.lora, "critic.lora", seed)
    decoder = stored.model.get_decoder()
    critic = Critic(decoder, new_value_head(model, decoder.config.get_text_config().hidden_size))
    critic.activations = load_sharded(critic, critic.decoder, stored, model, ranks, length)
    return critic


def critic_summary(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of the critic from the sums of all ranks, or no metrics if there is no critic."""
    get = {name: float(value) for name, value in sums.items() if value.dim() == 0}
    count = get.get("value/tokens", 0.0)
    if not count:
        return {}
    error = get["value/error_squared"] / count - (get["value/error"] / count) ** 2
    _, spread = moments("return", get, count)
    return {
        "value/bias": get["value/error"] / count,
        "value/explained_variance": 1 - error / spread if spread > 0 else 0.0,
        "value/clipped": get["value/clipped"] / count,
    }
