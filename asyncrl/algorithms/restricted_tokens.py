"""Tokens that were sampled under a grammar which took away much of the policy's probability.

Where a grammar allows the tokens A of the vocabulary, the behaviour policy is mu(a) = pi_b(a) / Z_b on A and 0
elsewhere. The mass Z_b is the sum of pi_b over A. The learner computes log-probs of pi_theta without the grammar.
So the ratio pi_theta / mu = Z_b pi_theta / pi_b is Z_b, not 1, even if the policy has not changed.

The policy that generates has the gradient of log pi_theta - log Z_theta, whose second term needs A. Ratio and gradient
are both wrong where Z_b is far from 1, so nothing is learned there. The token is dropped from the losses of the policy,
and every policy of the learner counts as the behaviour policy at it: its ratio is 1 and its KL is 0.

Where Z_b is near 1, ratio and gradient are those of a token without a grammar, up to the factor Z_b. Values are learned
at all tokens: a critic's value is that of the policy with its grammar.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Tokens


def with_restricted_fixed(tokens: Tokens) -> Tokens:
    """The tokens, whose proximal and reference log-probs are the behaviour's where a grammar restricted the token."""
    proximal, reference = (
        None if logprobs is None else behaviour_where_restricted(logprobs, tokens)
        for logprobs in (tokens.proximal, tokens.reference)
    )
    return replace(tokens, proximal=proximal, reference=reference)


def behaviour_where_restricted(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """logprobs float[N], and the behaviour log-probs, without gradient, where a grammar restricted the token."""
    return logprobs if tokens.restricted is None else torch.where(tokens.restricted, tokens.behaviour, logprobs)
