"""Which tokens tie probability and advantage together: those whose updates spend the entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses.base import Candidates


def covariance(candidates: Candidates) -> tuple[Tensor, int]:
    """(log pi - mean)(A - mean) float64[M] at the start of the step, means over the global batch; and that batch's
    policy tokens."""
    logprobs, advantages = candidates.proximal.double(), candidates.advantages.double()
    sums = torch.stack([logprobs.sum(), advantages.sum(), logprobs.new_tensor(logprobs.numel())])
    logprob_sum, advantage_sum, count = candidates.reduce(sums)
    total = count.clamp(min=1)
    return (logprobs - logprob_sum / total) * (advantages - advantage_sum / total), int(count)
