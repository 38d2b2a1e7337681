"""The settings of the batches of a run, and of the episodes that it keeps for people to read."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.algorithms.from_config import label_needs
from asyncrl.config.schema import AlgorithmConfig, LearnerConfig
from asyncrl.types import LabelNeeds


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings that the batch of one step is built with. They may change when a run resumes.

    - `minibatches`: the number of updates of a step.
    - `micro_tokens`: the maximum number of tokens that a rank computes in one pass.
    - `shared_prefixes`: true if passes compute shared prefixes once. None: the kind of device decides.
    - `router_replay`: true if tokens go to the experts that the engine recorded.
    - `min_grammar_mass`: a token counts as restricted if a grammar left the policy less probability mass than this.
    - `greedy_sibling`: true if the first member of every group was decoded greedily.
    - `needs`: the labels that the algorithm reads.
    """

    minibatches: int
    micro_tokens: int
    shared_prefixes: bool | None
    router_replay: bool
    min_grammar_mass: float
    greedy_sibling: bool
    needs: LabelNeeds

    @staticmethod
    def of(learner: LearnerConfig, algorithm: AlgorithmConfig) -> BatchSettings:
        """The settings that these sections of the configuration give."""
        return BatchSettings(
            learner.minibatches,
            learner.micro_tokens,
            learner.shared_prefixes,
            learner.router_replay,
            learner.min_grammar_mass,
            algorithm.greedy_sibling,
            label_needs(algorithm),
        )


EVALUATED_PART = 8
"""Held-out episodes get one part of this many of the bytes for kept episodes."""


@dataclass(frozen=True, slots=True)
class KeepSettings:
    """The settings of the kept episodes.

    - `groups`: the number of groups that are kept of each step.
    - `evaluated`: the number of held-out episodes that are kept of each evaluation.
    - `max_bytes`: the maximum number of bytes that all kept episodes of the run take together.
    - `seed` decides which groups are chosen at random.
    - `uploads`: the sinks of metrics get the episodes, too.
    """

    groups: int
    evaluated: int
    max_bytes: int
    seed: int
    uploads: bool = False

    @property
    def of_training(self) -> int:
        """The maximum number of bytes that kept episodes of training take together. Held-out ones get the rest."""
        return self.max_bytes - (self.max_bytes // EVALUATED_PART if self.evaluated else 0)
