"""The learner's own log-probs for the canary of a version (see weights/canary.py)."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import WeightsError
from asyncrl.learner.packing import PackedSequences
from asyncrl.learner.policy import Policy
from asyncrl.learner.ranks import Ranks
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
    tokens = canary_tokens(config.run.seed, policy.vocabulary, min(LENGTH, config.actor.max_tokens))
    packed = PackedSequences.of([torch.tensor(tokens)])
    packed = (packed.padded() if policy.pads_passes else packed).divided(ranks.context).to(ranks.device)
    with torch.compiler.set_stance("force_eager") if policy.is_compiled else nullcontext():
        logprobs, _ = policy(packed, temperature=1.0)
    try:
        return Canary(tokens, tuple(logprobs[1 : len(tokens)].tolist()), config.model.dtype)
    except ValueError as error:
        raise WeightsError(
            f"version {version} is not published, since the learner's own log-probs with it are not finite: look at "
            "learner/loss and the gradient norms of the last steps; asyncrl trains on from the newest checkpoint, with "
            "a smaller learner.lr for example"
        ) from error
