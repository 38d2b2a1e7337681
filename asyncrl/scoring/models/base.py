"""The interface of a reward model, and the scores that it gives to steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import ScoringError
from asyncrl.scoring.transcript import Transcript

_MAX_LOGIT = 30.0
"""The logit that a probability of 1 gets. In float32, the sigmoid of a larger logit is the same."""


@dataclass(frozen=True, slots=True, eq=False)
class StepScores:
    """The scores of one episode's K steps: probability float32[K] in [0, 1] and logit float32[K], its log-odds.

    For a model with two labels, the logit is the positive label's logit minus the negative label's. An implicit
    model (prime.py), which has no labels, gives the logit itself.

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
        """Scores from logits [K]: the probability is their sigmoid."""
        logit = np.asarray(logits, np.float32)
        return StepScores((0.5 * (1 + np.tanh(0.5 * logit.astype(np.float64)))).astype(np.float32), logit)

    @staticmethod
    def of_probabilities(probabilities: ArrayLike) -> StepScores:
        """Scores from probabilities [K]: the logit is log p/(1-p), bounded so that 0 and 1 stay finite.

        Raises ScoringError: a value is not a probability.
        """
        given = np.asarray(probabilities, np.float64)
        if not ((given >= 0) & (given <= 1)).all():
            raise ScoringError(f"step scores are not finite, or outside [0, 1]: {given.tolist()}")
        with np.errstate(divide="ignore"):
            logit = np.clip(np.log(given) - np.log1p(-given), -_MAX_LOGIT, _MAX_LOGIT)
        return StepScores(given.astype(np.float32), logit.astype(np.float32))

    def __len__(self) -> int:
        return len(self.probability)


Score = TypeVar("Score")


class RewardModel(Protocol[Score]):
    """Scores episodes, given as transcripts."""

    @property
    def name(self) -> str:
        """Name and version, which every label records."""
        ...

    def score(self, transcripts: Sequence[Transcript]) -> list[Score]:
        """One score for each transcript, in order. A score does not depend on the other transcripts of the batch.

        Raises ScoringError: a transcript cannot be scored, for example because it is too long. Raises UnavailableError:
        a remote service cannot be reached, so the transcripts are not at fault.
        """
        ...


ProcessRewardModel = RewardModel[StepScores]
"""Scores the steps of each episode."""
OutcomeModel = RewardModel[float]
"""Scores each whole episode with one finite number."""
