"""Tokens that are older than replay.max_lag, in sequences whose other tokens are trained (replay.old_groups.mask).

An old token is context without loss. Rewards, baselines, advantages and returns are computed from whole sequences, so
they are the same as without old tokens. The loss, the corrections, the critic's loss and their metrics leave old tokens
out: the ratio of a sequence, for example, has only the tokens that are trained. Losses are divided by the number of
trained tokens, or by the number of sequences or groups that have a trained token.

The tokens of a greedily sampled member (algorithm.greedy_sibling) are treated in the same way: the member is only a
baseline.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.algorithms.batch import Tokens
from asyncrl.algorithms.policy_tokens import PolicyTokens


def only_trained(tokens: Tokens) -> Tokens:
    """The tokens, with a `view` without the old tokens. In this view, a sequence may be empty."""
    if tokens.old is None:
        return tokens
    view = PolicyTokens.of(tokens)
    return replace(tokens, view=view.narrow(~view.take(tokens.old)))
