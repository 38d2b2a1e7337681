"""Admission: the formula that bounds the age that data has when the learner trains on it.

With B trajectories trained per policy version, at most `(max_lag + version + 1) * B` trajectories of the whole run may
be accepted or in generation. If they are trained in the order of their starts, none waits for more than `max_lag`
versions. In another order some may wait longer, and batches/planning.py evicts their groups. With `max_lag = 0`, each
version generates its own batch.

The replay server Reverb applies this formula only to inserts, which come after generation.

The formula bounds uses, so a trajectory that may be trained R times counts R times. The first batch already takes the
room of R batches, so R replaces the 1 in the formula. Oversampling adds a share of a batch for groups that filters
refuse. It does not make trained data older: surplus groups that become too old are evicted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """The limit on started trajectories.

    - `max_lag`: the largest allowed age of trained data, in versions
    - `per_version`: B
    - `uses`: R
    - `oversample`: 1, plus the share of a batch that is added for refused groups
    """

    max_lag: int
    per_version: int
    uses: int = 1
    oversample: float = 1.0

    def capacity(self, version: int) -> int:
        """The total number of uses of trajectories that may be admitted, once `version` is published."""
        surplus = round(self.per_version * (self.oversample - 1)) * self.uses
        return (self.max_lag + version + self.uses) * self.per_version + surplus
