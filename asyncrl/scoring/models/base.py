"""The protocols of process reward models and outcome models, and what a step's score is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import ScoringError
from asyncrl.scoring.transcript import Transcript

_MAX_LOGIT = 30.0
"""The logit that stands for a probability of 1, at which float32 has no other."""


@dataclass(frozen=True, slots=True, eq=False)
class StepScores:
    """The scores of one episode's K steps: probability float32[K] in [0, 1] and logit float32[K], its log-odds.

    A model with two labels has the logit positive minus negative; an implicit one has its value.

    Raises ScoringError: the shapes differ, or a score is not finite.
    """

    probability: NDArray[np.float32]
    logit: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.probability.shape != self.logit.shape or self.probability.ndim != 1:
            raise ScoringError(f"probabilities {self.probability.shape} and logits {self.logit.shape} must be [K]")
        if not (np.isfinite(self.probability).all() and np.isfinite(self.logit).all()):
            raise ScoringError(f"a step score is not finite: {self.probability.tolist()}")

    @staticmethod
    def of_logits(logits: ArrayLike) -> StepScores:
        """The scores whose probability is the sigmoid of the logits, [K]."""
        logit = np.asarray(logits, np.float32)
        return StepScores((0.5 * (1 + np.tanh(0.5 * logit.astype(np.float64)))).astype(np.float32), logit)

    @staticmethod
    def of_probabilities(probabilities: ArrayLike) -> StepScores:
        """The scores of a model that tells no logits, [K]: log p/(1-p), bounded so that 0 and 1 stay finite.

        Raises ScoringError: a value is no probability.
        """
        given = np.asarray(probabilities, np.float64)
        if not ((given >= 0) & (given <= 1)).all():
            raise ScoringError(f"step scores must be probabilities, and not finite or outside [0, 1]: {given.tolist()}")
        with np.errstate(divide="ignore"):
            logit = np.clip(np.log(given) - np.log1p(-given), -_MAX_LOGIT, _MAX_LOGIT)
        return StepScores(given.astype(np.float32), logit.astype(np.float32))

    def __len__(self) -> int:
        return len(self.probability)


class ProcessRewardModel(Protocol):
    """Scores the steps of episodes."""

    @property
    def name(self) -> str:
        """Name and version, which are stamped on every label."""
        ...

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """The scores of each transcript's steps, in order; the same whatever else is in the batch.

        Raises ScoringError: a transcript cannot be scored, such as one that is too long. Raises UnavailableError: a
        service that is asked cannot be reached, which is no fault of the transcripts.
        """
        ...


class OutcomeModel(Protocol):
    """Scores whole episodes."""

    @property
    def name(self) -> str:
        """Name and version, which are stamped on every label."""
        ...

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        """One finite number a transcript; the same whatever else is in the batch.

        Raises ScoringError: a transcript cannot be scored, such as one that is too long. Raises UnavailableError: a
        service that is asked cannot be reached, which is no fault of the transcripts.
        """
        ...
