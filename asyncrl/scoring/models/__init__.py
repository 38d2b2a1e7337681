"""Process reward models and outcome models, one file for each family."""

from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel, RewardModel, StepScores
from asyncrl.scoring.transcript import Passage, Transcript

__all__ = ["OutcomeModel", "Passage", "ProcessRewardModel", "RewardModel", "StepScores", "Transcript"]
