"""A user's own parts, one of each kind, as docs/algorithms.md shows them."""

from asyncrl.algorithms import (
    Aggregation,
    Correction,
    Kl,
    Loss,
    LossStream,
    LrScale,
    Reward,
    SequenceAdvantage,
    TokenLosses,
    Value,
    param,
)


class Centred(SequenceAdvantage):
    """Formula: A = R - mean over the batch"""

    name = "centred"

    def scores(self, episodes):
        return episodes.reward - episodes.reward.mean()


class Squared(Loss):
    """Formula: -A log pi_theta + weight log^2 r"""

    name = "squared"

    weight: float = param(0.1, "weight of the penalty", "[0, inf)")

    def __call__(self, updates):
        penalty = self.weight * updates.log_ratio.square()
        return TokenLosses(penalty - updates.advantages * updates.logprobs)


class Near(Correction):
    """Formula: drop the token if abs(log w) > limit"""

    name = "near"
    by_token = True

    limit: float = param(0.5, "largest log-ratio that is kept", "(0, inf)")

    def keep(self, ages):
        return ages.log_w.abs() <= self.limit


class Quartic(Kl):
    """Formula: d^4"""

    name = "quartic"

    def form(self, d):
        return d**4


class HalfMean(Aggregation):
    """Formula: sum of all tokens / (2 N)"""

    name = "half-mean"

    def __call__(self, losses, sequences, lengths, totals):
        return losses.double().sum() / max(1, 2 * totals.tokens)


class Short(Reward):
    """Formula: R - weight len / 1000, len in policy tokens"""

    name = "short"

    weight: float = param(0.1, "what 1000 tokens cost", "[0, inf)")

    def __call__(self, episodes):
        return episodes.reward - self.weight * episodes.lengths / 1000


class Absolute(Value):
    """Formula: abs(V - R)"""

    name = "absolute"

    def __call__(self, values, old, returns):
        error = (values - returns).abs()
        return error, error < 0  # False everywhere: this loss has no clip.


class Focal(LossStream):
    """Formula: -(1 - sg(pi_theta))^2 log pi_theta"""

    name = "focal"

    def __call__(self, updates, reference):
        missing = 1 - updates.logprobs.detach().exp()
        return TokenLosses(-(missing**2) * updates.logprobs)


class Cautious(LrScale):
    """Formula: 1 / (1 + mean of abs(log pi_theta - log mu))"""

    name = "cautious"

    def sums(self, view, log_policy):
        moved = log_policy.abs().sum().double()
        return {"lr_scale/moved": moved, "lr_scale/tokens": moved.new_tensor(log_policy.numel())}

    def __call__(self, sums):
        return 1 / (1 + sums["lr_scale/moved"] / max(1, sums["lr_scale/tokens"]))
