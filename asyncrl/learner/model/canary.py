"""The learner's own log-probs for the canary of a version (see weights/canary.py), or those of a model that is
published in its place."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.weights.canary import LENGTH, Canary, canary_tokens


@torch.no_grad()
def canary_of(policy: Policy, version: int, config: TrainConfig, ranks: Ranks) -> Canary | None:
    """The canary of the weights that `policy` has now, as `version`; None where there should be none.

    All ranks call this alike, and all compute the same sequence, since each needs its part in gathering the weights.
    Nothing is compiled for a sequence of this length.

    Raises WeightsError on all ranks: the log-probs are not finite.
    """
    if not config.weights.canary:
        return None
    tokens = _tokens(config, policy.vocabulary)
    packed = PackedSequences.of([torch.tensor(tokens)])
    packed = (packed.padded() if policy.pads_passes else packed).divided(ranks.context).to(ranks.device)
    with torch.compiler.set_stance("force_eager") if policy.is_compiled else nullcontext():
        logprobs, _ = policy(packed, temperature=1.0)
    try:
        return _canary(tokens, logprobs[1 : len(tokens)], config)
    except ValueError as error:
        raise WeightsError(
            f"version {version} is not published, since the learner's own log-probs with it are not finite: look at "
            "learner/loss and the gradient norms of the last steps; asyncrl trains on from the newest checkpoint, with "
            "a smaller learner.lr for example"
        ) from error


@torch.no_grad()
def canary_of_model(model: Any, config: TrainConfig) -> Canary | None:
    """The same for a Hugging Face `model` that is published as it was read, in float32.

    Raises ConfigError: the log-probs are not finite.
    """
    if not config.weights.canary:
        return None
    tokens = _tokens(config, model.config.get_text_config().vocab_size)
    ids = torch.tensor(tokens)
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    try:
        return _canary(tokens, logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0], config)
    except ValueError as error:
        raise ConfigError(
            f"the log-probs of {config.model.path!r} are not finite: its files are damaged, or of a training that "
            "diverged; evaluate an earlier checkpoint"
        ) from error


def _tokens(config: TrainConfig, vocabulary: int) -> tuple[int, ...]:
    """A server's context may end with the longest episode, and has room for a token behind these."""
    return canary_tokens(config.run.seed, vocabulary, min(LENGTH, max(2, config.actor.max_tokens - 1)))


def _canary(tokens: tuple[int, ...], logprobs: torch.Tensor, config: TrainConfig) -> Canary:
    """Raises ValueError: they are not finite."""
    return Canary(tokens, tuple(logprobs.tolist()), config.model.dtype)
