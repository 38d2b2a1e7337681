"""Compares the episodes that are trained with the episodes that were sampled: their lengths, turns and rewards.

Episodes that still run are longer than others, so a count at one moment would be biased. The unit of comparison is
therefore a cohort: the groups that were begun at one policy version. A cohort is counted once all of its groups are
decided, and cohorts are counted in the order of their versions (`cohorts.py`).

The test asks if the age bound chooses by length, turns or reward. In each cohort it compares the trained groups with
the evicted ones. Groups that filters or failures removed say nothing about the age bound, and are left out.

If eviction were independent of a quantity x, the trained groups would be a random choice from the trained and evicted
groups of the cohort.

Let a cohort have T trained and E evicted groups, N in total. Let m be the mean of x over these groups, and s its
standard deviation (with N - 1). The sum of (x - m) / s over the trained groups then has the mean 0 and the variance
T * E / N. This is the stratified permutation test of Mantel (1963, JASA 58, 690-700).

Let S be the sum of these deviations over the cohorts of a run, and V the sum of the variances. A run tests S and V
again and again. So the evidence is the normal mixture of Robbins (1970, The Annals of Mathematical Statistics 41,
1397-1409), with a constant r: sqrt(r / (V + r)) * exp(S^2 / (2 * (V + r))).

If the deviations are normal and there is no bias, the probability that the evidence reaches 1 / a at any time is at
most a. The deviations of cohorts are only nearly normal, so a unit test simulates runs with small cohorts and skewed
quantities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

ENDS = ("trained", "masked", "evicted", "filtered", "dropped", "dead")
"""The ends of an episode. An episode is `trained` if a batch trains some of its tokens. It is `masked` if a batch
contains it but trains none of its tokens, since all are too old."""
WHOLE = ("episodes", "tokens", "turns", "scored")
"""The fields of `Sums` that are whole numbers."""
QUANTITIES = ("length", "turns", "reward")
FALSE_ALARM = 0.001
"""The largest probability that a run whose age bound chooses at random ever gets a warning."""
MIXTURE = 30.0
"""The constant r of the evidence, in groups. With a larger r, the first evictions say less, so that skewed quantities
raise fewer false alarms; with a smaller r, a bias is found earlier."""
SMALLEST_SHIFT = 0.02
"""A smaller shift of the mean of the trained groups, in standard deviations, is not worth a warning."""
ROUNDING = 1e-9
"""A sum of squared differences below this share of the sum of squares is a rounding error."""


class Sums(Struct, array_like=True):
    """Sums over episodes.

    - `tokens`: the number of tokens that the policy sampled
    - `scored`: the number of episodes with final labels, and `reward`: the sum of their rewards
    - `lengths`: the number of episodes by their length. The key k means 2^(k-1) to 2^k - 1 sampled tokens
    """

    episodes: int = 0
    tokens: int = 0
    turns: int = 0
    scored: int = 0
    reward: float = 0.0
    lengths: dict[int, int] = {}

    def add(self, tokens: int, turns: int, reward: float | None) -> None:
        """Add an episode. `reward` is `None` without final labels."""
        self.episodes += 1
        self.tokens += tokens
        self.turns += turns
        if reward is not None:
            self.scored += 1
            self.reward += reward
        self.lengths[tokens.bit_length()] = self.lengths.get(tokens.bit_length(), 0) + 1

    def __add__(self, other: Sums) -> Sums:
        keys = sorted(self.lengths.keys() | other.lengths.keys())
        return Sums(
            self.episodes + other.episodes,
            self.tokens + other.tokens,
            self.turns + other.turns,
            self.scored + other.scored,
            self.reward + other.reward,
            {key: self.lengths.get(key, 0) + other.lengths.get(key, 0) for key in keys},
        )

    @property
    def means(self) -> dict[str, float | None]:
        """The mean of each of QUANTITIES. The length is in sampled tokens. `None` without episodes."""
        length, turns = (total / self.episodes if self.episodes else None for total in (self.tokens, self.turns))
        return {"length": length, "turns": turns, "reward": self.reward / self.scored if self.scored else None}


class Contrast(Struct, array_like=True):
    """The test of one quantity.

    - `deviation`, `variance`: S and V
    - `trained`: the number of trained groups in the cohorts that say something about the quantity
    """

    deviation: float = 0.0
    variance: float = 0.0
    trained: int = 0

    @classmethod
    def of_sums(cls, trained: int, evicted: int, of_trained: float, total: float, squares: float) -> Contrast:
        """The test of one cohort, from its numbers of groups and sums of the quantity (see `cohorts.Moments`). It says
        nothing unless some groups are trained, some are evicted, and the quantity differs between groups."""
        groups = trained + evicted
        if not trained or not evicted:
            return cls()
        mean = total / groups
        spread = squares - total * mean
        if spread <= ROUNDING * squares:
            return cls()
        deviation = (of_trained - trained * mean) / math.sqrt(spread / (groups - 1))
        return cls(deviation, trained * evicted / groups, trained)

    def __add__(self, other: Contrast) -> Contrast:
        return Contrast(self.deviation + other.deviation, self.variance + other.variance, self.trained + other.trained)

    @property
    def shift(self) -> float:
        """The mean of the trained groups minus that of the trained and evicted groups, in standard deviations of the
        groups of a cohort."""
        return self.deviation / self.trained if self.trained else 0.0

    @property
    def log_evidence(self) -> float:
        """The logarithm of the evidence that the age bound chooses by this quantity."""
        whole = self.variance + MIXTURE
        return 0.5 * math.log(MIXTURE / whole) + self.deviation**2 / (2 * whole)

    def is_bias(self, false_alarm: float = FALSE_ALARM) -> bool:
        """True if the age bound chooses by this quantity more than chance explains. In a run without a bias, this is
        true for any of QUANTITIES at any time with a probability of at most `false_alarm`."""
        # Each of the quantities gets an equal part of the false alarms.
        return self.log_evidence >= math.log(len(QUANTITIES) / false_alarm)


class Selection(Struct, array_like=True):
    """The decided episodes of a run: sums by their end, and the tests by quantity."""

    sums: dict[str, Sums] = {}
    contrasts: dict[str, Contrast] = {}

    def __add__(self, other: Selection) -> Selection:
        return Selection(
            {end: self.of(end) + other.of(end) for end in ENDS if end in self.sums or end in other.sums},
            {name: self.contrast(name) + other.contrast(name) for name in QUANTITIES},
        )

    def of(self, end: str) -> Sums:
        """The sums over the episodes with this end."""
        return self.sums.get(end, Sums())

    def contrast(self, quantity: str) -> Contrast:
        """The test of a quantity."""
        return self.contrasts.get(quantity, Contrast())

    @property
    def sampled(self) -> Sums:
        """The sums over all decided episodes."""
        return sum(self.sums.values(), Sums())

    @property
    def shown(self) -> dict[str, Sums]:
        """The sums of all decided episodes, as `sampled`, and of each end with episodes. Empty without episodes."""
        found = {end: self.of(end) for end in ENDS if self.of(end).episodes}
        return {"sampled": self.sampled, **found} if found else {}

    def described(self) -> dict[str, dict[str, float]]:
        """The number of episodes and the known means, for `sampled` and each end with episodes."""
        return {
            end: {"episodes": sums.episodes} | {name: mean for name, mean in sums.means.items() if mean is not None}
            for end, sums in self.shown.items()
        }

    def by_length(self) -> dict[str, dict[int, int]]:
        """The number of episodes by end and by length. The key k means k to 2k - 1 sampled tokens."""
        return {
            end: {1 << key >> 1: count for key, count in sorted(sums.lengths.items())}
            for end, sums in self.shown.items()
        }

    def biased(self) -> list[str]:
        """The quantities by which the age bound chooses, more than chance explains, and enough to matter."""
        return [
            name
            for name in QUANTITIES
            if self.contrast(name).is_bias() and abs(self.contrast(name).shift) >= SMALLEST_SHIFT
        ]

    def values(self) -> Iterator[tuple[str, float]]:
        """Yield all numbers by their names as metrics. `from_values` reads them."""
        by_length = self.by_length()
        for end in ENDS:
            sums = self.of(end)
            for name in (*WHOLE, "reward"):
                yield f"decided/{end}/{name}", getattr(sums, name)
            for length, count in by_length.get(end, {}).items():
                yield f"decided/{end}/length/{length}", count
        for name in QUANTITIES:
            contrast = self.contrast(name)
            for part in ("deviation", "variance", "trained", "shift"):
                yield f"age_bias/{name}/{part}", getattr(contrast, part)

    @classmethod
    def from_values(cls, rows: Iterable[Mapping[str, Any]]) -> Selection:
        """The selection over all shards, from one row of metrics of each shard. Rows may lack the metrics."""
        return sum_selections(map(_from_row, rows))


def sum_selections(parts: Iterable[Selection]) -> Selection:
    """The selection over all shards."""
    return sum(parts, Selection())


def _from_row(row: Mapping[str, Any]) -> Selection:
    found = Selection()
    for end in ENDS:
        prefix = f"decided/{end}/"
        if not row.get(f"{prefix}episodes"):
            continue
        episodes, tokens, turns, scored = [int(row.get(prefix + name, 0)) for name in WHOLE]
        marks = (name.removeprefix(f"{prefix}length/") for name in row if name.startswith(f"{prefix}length/"))
        lengths = {int(mark).bit_length(): int(row[f"{prefix}length/{mark}"]) for mark in marks}
        found.sums[end] = Sums(episodes, tokens, turns, scored, row.get(f"{prefix}reward", 0.0), lengths)
    for name in QUANTITIES:
        parts = (row.get(f"age_bias/{name}/{part}", 0) for part in ("deviation", "variance", "trained"))
        found.contrasts[name] = Contrast(*parts)
    return found
