"""The math of a learner step as functions on tensors: rewards, advantages, corrections for the age of the data, the
policy loss, the KL, and the sum that is trained.

Tokens are packed: N tokens of S sequences are concatenated. `sequence` int64[N] has the index of each token's sequence
in the global batch, and `mask` bool[N] is true on the tokens that the policy sampled. Tensors of facts about whole
sequences have shape [S]. Every rank has all of them, with the same values.

This package keeps promise 6 of docs/concepts.md: the learner's math is exact. Packed and unpacked tokens give the same
result, and so do all splits into micro-batches and all numbers of ranks.

policy_tokens.py first selects the M policy tokens, and every formula runs on tensors of shape [M]. So all other tokens
contribute exactly 0. aggregation.py divides only by counts over the global minibatch. The learner's function `reduce`
sums over ranks, and global_threshold.py finds thresholds over all ranks, so every rank has the same statistics.

In reading order:
- parts.py: the base of every part of an algorithm. A part is an advantage estimator, a loss, a correction, a KL form,
  an aggregation or a change of rewards
- batch.py: the episodes and tokens that the parts get; policy_tokens.py: the selection of policy tokens
- from_config.py, composition.py, conflicts.py: the parts that the configuration names, and the forbidden combinations
- step_advantages.py: advantages and importance weights, once a step; step_loss.py: the loss, in every pass;
  lr_scale.py: the size of each update
- algorithm.py: `Algorithm`, the only class that the learner calls; metrics.py: the numbers of a step

Kinds whose parts are all in one file: kl.py (KL forms), aggregation.py (how losses become one number), loss_streams.py
(several losses with weights).

Supporting files:
- registry.py: a part by its kind and name; probe.py: a test of a user's own parts; docs.py, presets.py: the lists and
  tables of parts and presets
- proximal.py: the source of the proximal policy's log-probs; demonstrations.py: demonstrations in groups
- old_tokens.py, restricted_tokens.py: tokens that are too old, or that a grammar restricted
- log_ratios.py, divergences.py, ratio_bins.py: ratios and distances of two policies, and counts of ratios
- group_statistics.py, linear_scan.py: statistics of groups, and discounted sums

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
from asyncrl.algorithms.lr_scale import LrScale
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
    "LrScale",
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
