"""Advantages, losses, corrections, KL forms and aggregations, as pure functions on tensors.

One convention throughout: tokens are packed. N tokens of S sequences lie one after the other, `sequence` int64[N] tells
whose a token is (all tokens of a sequence together, an index into the S sequences of the global batch), and `mask`
bool[N] is true on the tokens that the policy sampled. What concerns whole sequences has shape [S] and is the same on
every rank.

Arithmetic never sees a masked token: the M policy tokens are picked out first (`view.View`), every formula runs on
[M], and results are scattered back into zeros. So a masked token contributes exactly nothing, whatever it holds, and no
formula needs a mask.

A part (`parts.Part`) is one estimator, loss, correction, KL form, aggregation or reward change: a frozen dataclass of
its parameters with one method, in a file of its own. The configuration names parts (`registry`); `compose.Algorithm`
puts them together for the learner.
"""

from asyncrl.algorithms.advantages.base import Advantage, Estimate, SequenceAdvantage
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.corrections.base import Correction
from asyncrl.algorithms.kl import Kl
from asyncrl.algorithms.losses.base import Loss, TokenLosses
from asyncrl.algorithms.losses.value import Value
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.algorithms.streams import LossStream

__all__ = [
    "Advantage",
    "Aggregation",
    "Correction",
    "Episodes",
    "Estimate",
    "Kl",
    "Loss",
    "LossStream",
    "Reward",
    "SequenceAdvantage",
    "TokenLosses",
    "Tokens",
    "Value",
    "param",
]
