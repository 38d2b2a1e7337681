"""verl's operators over asyncrl's engine, learner and scorers. docs/verl.md has a GRPO script.

Generation, log-probs, values, rewards and updates are methods of worker groups. `compute_advantage` is a function,
because it needs no model.
"""

from asyncrl.compat.verl.controller.operators.advantage import compute_advantage
from asyncrl.compat.verl.controller.operators.engine_rollout import EngineRollout
from asyncrl.compat.verl.controller.operators.from_config import (
    ActorRolloutRefWorker,
    CriticWorker,
    PromptFeed,
    RewardModelWorker,
    open_algorithm,
    policy_parts,
)
from asyncrl.config.compose import read as read_config
from asyncrl.config.schema import TrainConfig

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "EngineRollout",
    "PromptFeed",
    "RewardModelWorker",
    "TrainConfig",
    "compute_advantage",
    "open_algorithm",
    "policy_parts",
    "read_config",
]
