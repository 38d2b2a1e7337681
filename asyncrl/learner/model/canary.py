"""The canary of a version: log-probs of a fixed short sequence, which an engine must repeat before it serves the
version.

`weights/canary.py` has the check. This file computes the log-probs, by the learner's policy or by a model that is
published unchanged.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import ConfigError, WeightsError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.weights.canary import LENGTH, Canary, canary_tokens


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """The settings of a run's canaries.

    - `seed`: the seed of their tokens.
    - `max_tokens`: the maximum number of tokens in one sequence of an episode.
    - `dtype`: the type in which engines compute.
    """

    seed: int
    max_tokens: int
    dtype: str

    def tokens(self, vocabulary: int) -> tuple[int, ...]:
        """Return the token ids of the canary, for a policy with `vocabulary` ids."""
        # A server's context may be as short as the longest episode, and the server samples one more token.
        return canary_tokens(self.seed, vocabulary, min(LENGTH, max(2, self.max_tokens - 1)))


@torch.no_grad()
def canary_of(policy: Policy, version: int, settings: CanarySettings | None, ranks: Ranks) -> Canary | None:
    """Compute the canary of `version`, which has the present weights of `policy`. Returns None without settings.

    Raises WeightsError on all ranks: the log-probs are not finite.
    """
    if settings is None:
        return None
    # All ranks compute the same sequence, since each takes part in gathering the weights.
    tokens = settings.tokens(policy.vocabulary)
    packed = PackedSequences.of([torch.tensor(tokens)])
    packed = (packed.padded() if policy.pads_passes else packed).divided(ranks.context).to(ranks.device)
    # Nothing is compiled for a sequence of this length.
    with torch.compiler.set_stance("force_eager") if policy.is_compiled else nullcontext():
        logprobs, _ = policy(packed, temperature=1.0)
    try:
        return Canary(tokens, tuple(logprobs[1 : len(tokens)].tolist()), settings.dtype)
    except ValueError as error:
        raise WeightsError(
            f"version {version} is not published, since the learner's own log-probs with it are not finite: look at "
            "learner/loss and the gradient norms of the last steps, and continue from the newest checkpoint, for "
            "example with a smaller learner.lr"
        ) from error


@torch.no_grad()
def canary_of_model(model: Any, path: str, settings: CanarySettings | None) -> Canary | None:
    """Compute, in float32, the canary of a Hugging Face `model` that is published unchanged from `path`. Returns None
    without settings.

    Raises ConfigError: the log-probs are not finite.
    """
    if settings is None:
        return None
    tokens = settings.tokens(model.config.get_text_config().vocab_size)
    ids = torch.tensor(tokens)
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    try:
        return Canary(tokens, tuple(logprobs.tolist()), settings.dtype)
    except ValueError as error:
        raise ConfigError(
            f"the log-probs of {path!r} are not finite: its files are damaged, or its training diverged; "
            "evaluate an earlier checkpoint"
        ) from error
