"""The math of a learner step: rewards, advantages, corrections, losses, KL and their sum, as functions on tensors.

Tokens are packed: N tokens of S sequences are concatenated. `sequence` int64[N] has the index of each token's sequence
in the global batch, and `mask` bool[N] is true on the tokens that the policy sampled. Facts about whole sequences have
shape [S] and are the same on every rank.

This package keeps promise 6 of docs/concepts.md, the learner's math is exact: packed = unpacked, any micro-batch split
= one batch, n ranks = one rank. policy_tokens.py first selects the M policy tokens, and every formula runs on [M], so
that masked tokens contribute exactly 0. aggregation.py divides only by counts over the global minibatch.
global_threshold.py, and the sums over ranks (`reduce`), give every rank the same statistics.

In reading order:
- parts.py: the base of estimators, losses, corrections, KL forms, aggregations and reward changes (frozen dataclasses)
- batch.py: the episodes and tokens that the parts get; policy_tokens.py: the selection of policy tokens
- from_config.py, composition.py, conflicts.py: the parts that the configuration names, and the forbidden combinations
- step_advantages.py: advantages and importance weights, once a step; step_loss.py: the loss, in every pass
- algorithm.py: `Algorithm`, the only class that the learner calls; metrics.py: the numbers of a step

A new part is a new file in advantages/, losses/, corrections/ or rewards/. Discuss a change of an existing formula
first, since runs depend on it.
"""

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts, SequenceAdvantage
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.kl import Kl
from asyncrl.algorithms.loss_streams import LossStream
from asyncrl.algorithms.losses.base import Candidates, Loss, TokenLosses, Updates
from asyncrl.algorithms.losses.value import Value
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.policy_tokens import PolicyTokens, Segments
from asyncrl.algorithms.rewards.base import Reward

__all__ = [
    "Advantage",
    "Ages",
    "Aggregation",
    "Candidates",
    "Correction",
    "Episodes",
    "Estimate",
    "Kl",
    "Loss",
    "LossStream",
    "PolicyTokens",
    "Reward",
    "Rollouts",
    "Segments",
    "SequenceAdvantage",
    "TokenLosses",
    "Tokens",
    "Totals",
    "Updates",
    "Value",
    "param",
]
