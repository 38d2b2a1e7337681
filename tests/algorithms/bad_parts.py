"""A user's own parts with mistakes."""

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.corrections.base import Correction
from asyncrl.algorithms.loss_streams import Stream
from asyncrl.algorithms.losses.base import Loss, TokenLosses
from asyncrl.algorithms.lr_scale import LrScale


class Bare(Stream):
    """Formula: none"""

    name = "bare"


class Nameless(SequenceAdvantage):
    def scores(self, episodes):
        return episodes.reward


class Unwritten(SequenceAdvantage):
    name = "unwritten"


class Scalar(SequenceAdvantage):
    name = "scalar"

    def scores(self, episodes):
        return episodes.reward.mean()


class Misspelt(SequenceAdvantage):
    name = "misspelt"

    def scores(self, episodes):
        return episodes.rewrad


class Summed(Loss):
    name = "summed"

    def __call__(self, updates):
        return TokenLosses(-(updates.advantages * updates.logprobs).sum())


class Unprefixed(LrScale):
    name = "unprefixed"

    def sums(self, view, log_policy):
        return {"moved": log_policy.sum()}

    def __call__(self, sums):
        return 1.0


class Floats(Correction):
    name = "floats"

    def keep(self, ages):
        return ages.log_w


class Asks(SequenceAdvantage):
    """A correct part, which reads a score that only a run's rules give."""

    name = "asks"
    reads = ("style",)

    def scores(self, episodes):
        return episodes.extra["style"] - episodes.reward


class Undeclared(SequenceAdvantage):
    name = "undeclared"

    def scores(self, episodes):
        return episodes.score("style") - episodes.reward


class UndeclaredKey(SequenceAdvantage):
    name = "undeclared_key"

    def scores(self, episodes):
        return episodes.extra["style"] - episodes.reward
