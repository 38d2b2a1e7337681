"""A grammar may exclude much of the policy's probability while a token is sampled. The token is then called restricted,
and this file takes it out of the policy's losses.

If a grammar allows only the tokens A of the vocabulary, the behaviour policy is mu(a) = pi_b(a) / Z_b on A and 0
elsewhere. The mass Z_b is the sum of pi_b over A. The learner computes log-probs of pi_theta without the grammar. So
the ratio pi_theta / mu = Z_b pi_theta / pi_b is Z_b instead of 1 even if the policy has not changed.

The exact gradient is the gradient of log pi_theta - log Z_theta, where Z_theta is the sum of pi_theta over A. The
learner does not know A, so it cannot compute Z_theta. If Z_b is far from 1, both ratio and gradient are wrong, so the
token is dropped from the policy's losses.

Corrections, and metrics that compare two policies, leave the token out, too. It would change every mean over tokens.
Some code, such as an advantage with ratios, reads all policy tokens. For this code the token's proximal, reference and
trained log-probs are set to the behaviour log-prob, so that its ratio is 1 and its KL is 0.

If Z_b is near 1, ratio and gradient are right up to the factor Z_b, and the token stays in the losses. A critic learns
from all tokens, because it estimates the value of the policy with its grammar.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Tokens
from asyncrl.algorithms.policy_tokens import PolicyTokens


def with_restricted_fixed(tokens: Tokens) -> Tokens:
    """The tokens, with proximal and reference log-probs replaced by the behaviour log-probs on restricted tokens."""
    proximal, reference = (
        None if logprobs is None else behaviour_where_restricted(logprobs, tokens)
        for logprobs in (tokens.proximal, tokens.reference)
    )
    return replace(tokens, proximal=proximal, reference=reference)


def only_free(tokens: Tokens) -> Tokens:
    """The tokens, with a `view` without the restricted tokens. In this view, a sequence may be empty."""
    if tokens.restricted is None:
        return tokens
    view = PolicyTokens.of(tokens)
    return replace(tokens, view=view.narrow(~view.take(tokens.restricted)))


def behaviour_where_restricted(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """float[N]: logprobs float[N], replaced by the behaviour log-probs, without gradient, on restricted tokens."""
    return logprobs if tokens.restricted is None else torch.where(tokens.restricted, tokens.behaviour, logprobs)
