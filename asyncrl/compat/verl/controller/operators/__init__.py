"""verl's operators over our own engines: generation, log-probs, values, rewards, advantages and updates, each a method
of a worker group, but for `compute_advantage`, which needs no model. docs/verl.md has a GRPO script."""

from asyncrl.compat.verl.controller.operators.advantage import compute_advantage, open_algorithm
from asyncrl.compat.verl.controller.operators.critic import CriticWorker
from asyncrl.compat.verl.controller.operators.policy import ActorRolloutRefWorker
from asyncrl.compat.verl.controller.operators.prompts import PromptFeed
from asyncrl.compat.verl.controller.operators.reward import RewardModelWorker
from asyncrl.config.compose import read as read_config
from asyncrl.config.schema import TrainConfig

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "PromptFeed",
    "RewardModelWorker",
    "TrainConfig",
    "compute_advantage",
    "open_algorithm",
    "read_config",
]
