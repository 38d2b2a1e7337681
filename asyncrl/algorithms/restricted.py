"""Tokens that were sampled under a grammar which took away much of the policy's probability.

Where a grammar allows the tokens A of the vocabulary, the behaviour policy is mu(a) = pi_b(a) / Z_b on A and 0
elsewhere, with the mass Z_b, the sum of pi_b over A. The log-probs of the learner are those of pi_theta, without the
grammar. So the ratio pi_theta / mu = Z_b pi_theta / pi_b is Z_b, not 1, where the policy has not changed at all. And
the policy that generates has the gradient of log pi_theta - log Z_theta, whose second term needs A. Neither is right
where Z_b is far from 1, hence nothing is learned there: the token is dropped from the losses of the policy, and every
policy of the learner counts as the behaviour policy at it. So its ratio is 1 in ratios of whole turns and sequences,
and its KL is 0.

Where Z_b is near 1, ratio and gradient are those of a token without a grammar, up to the factor Z_b. Values are learned
at all tokens: a critic's value is that of the policy with its grammar.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Tokens


def held(tokens: Tokens) -> Tokens:
    """The tokens with the behaviour log-probs for proximal and reference ones where a grammar restricted them."""
    return replace(tokens, proximal=_held(tokens.proximal, tokens), reference=_held(tokens.reference, tokens))


def hold(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """logprobs float[N] of the policy with the behaviour log-probs where a grammar restricted tokens: no gradient."""
    return logprobs if tokens.restricted is None else torch.where(tokens.restricted, tokens.behaviour, logprobs)


def _held(logprobs: Tensor | None, tokens: Tokens) -> Tensor | None:
    return None if logprobs is None else hold(logprobs, tokens)
