"""The math of a learner step: rewards, advantages, corrections, losses, KL and their sum, as functions on tensors.

Tokens are packed: N tokens of S sequences lie one after the other. `sequence` int64[N] has the index of each token's
sequence in the global batch, and `mask` bool[N] is true on the tokens that the policy sampled. Facts about whole
sequences have shape [S] and are the same on every rank.

This room keeps promise 6, the learner's math is exact: packed = unpacked, any micro-batch split = one batch, n ranks =
one rank. policy_tokens.py picks the M policy tokens out first and every formula runs on [M], so a masked token
contributes exactly nothing. aggregation.py divides only by counts over the global minibatch. global_threshold.py and
`reduce` give every rank the same statistic.

In reading order:
- parts.py: one estimator, loss, correction, KL form, aggregation or reward change is a frozen dataclass in its own file
- batch.py: the episodes and tokens that the parts get; policy_tokens.py: the policy tokens among them
- from_config.py, composition.py, conflicts.py: the parts that the configuration names, and which go together
- step_advantages.py: advantages and importance weights, once a step; step_loss.py: the loss is summed, in every pass
- algorithm.py: `Algorithm`, the only class that the learner calls; metrics.py: the numbers of a step

A new part needs no one's consent: a file in advantages/, losses/, corrections/ or rewards/. A change of an existing
formula does, since runs depend on it.
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
