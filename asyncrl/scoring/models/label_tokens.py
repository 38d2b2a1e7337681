"""Causal models that judge a step by the next token: its logit is that of the good label minus that of the bad one.

Math-Shepherd and RLHFlow differ in the text around the steps (math_shepherd.py, rlhflow.py) and share all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.scoring.models.causal import CausalPRM, CausalReader, Readout, linear
from asyncrl.scoring.models.checkpoint import Checkpoint
from asyncrl.scoring.models.encoding import Encode

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig

Labels = tuple[int, int]
"""The token ids of the good and the bad label."""


def load_label_model(
    config: ScoringModelConfig, key: str, make_encode: Callable[[Any], tuple[Encode, Labels]]
) -> CausalPRM:
    """The causal model in the folder, read as `make_encode(tokenizer)` says. Raises ConfigError."""
    checkpoint = Checkpoint(config, key)
    model = checkpoint.language_model()
    encode, labels = make_encode(checkpoint.tokenizer())
    reader = CausalReader(model.base_model, _contrast(model.get_output_embeddings(), labels), config.micro_tokens)
    return CausalPRM(checkpoint.name, encode, reader, config.long_inputs == "drop_oldest")


def _contrast(head: Any, labels: Labels) -> Readout:
    good, bad = labels
    weight = head.weight[good].float() - head.weight[bad].float()
    bias = getattr(head, "bias", None)
    return linear(weight.detach(), None if bias is None else (bias[good].float() - bias[bad].float()).detach())
