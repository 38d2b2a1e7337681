"""The batch type, reward managers and interactions of verl under its names, for programs that were written for it.

asyncrl's trajectories can be converted to verl's layout and back. docs/verl.md lists the differences.

- `names.py`: makes all of these importable under verl's names
- `batches/`, `rewards/`: batches and reward managers
- `tools/`, `agent_loops/`, `interactions.py`, `rollouts.py`: what takes part in an episode
- `controller/`: worker groups
- `configuration/`: runs that are started with verl's options
"""

from asyncrl.compat.verl.batches.auto_padding import DataProtoConfig
from asyncrl.compat.verl.batches.batch_dimensions import collate_fn, fold_batch_dim, unfold_batch_dim, union_tensor_dict
from asyncrl.compat.verl.batches.from_batch import to_labels, to_trajectories
from asyncrl.compat.verl.batches.gathering import all_gather_data_proto
from asyncrl.compat.verl.batches.packed import add_tokens, to_episodes, to_tokens
from asyncrl.compat.verl.batches.padding import compute_position_id_with_mask, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.compat.verl.batches.parquet import read_parquet, write_parquet
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.rows import DataProtoItem
from asyncrl.compat.verl.batches.tensors import TensorBatch
from asyncrl.compat.verl.batches.to_batch import from_trajectories
from asyncrl.compat.verl.interactions import BaseInteraction
from asyncrl.compat.verl.names import provide_verl
from asyncrl.compat.verl.rewards.loading import VerlInteraction, VerlManager, load_reward_manager
from asyncrl.compat.verl.rewards.process_rewards import QwenPRMRewardManager, SkyworkPRMRewardManager
from asyncrl.compat.verl.rewards.reward_loop import RewardManagerBase
from asyncrl.compat.verl.rewards.reward_managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from asyncrl.compat.verl.rewards.rewarding import AbstractRewardManager, RewardManager, default_compute_score
from asyncrl.compat.verl.rollouts import BaseRollout

__all__ = [
    "AbstractRewardManager",
    "BaseInteraction",
    "BaseRollout",
    "BatchRewardManager",
    "DAPORewardManager",
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "QwenPRMRewardManager",
    "RewardManager",
    "RewardManagerBase",
    "SkyworkPRMRewardManager",
    "TensorBatch",
    "VerlInteraction",
    "VerlManager",
    "add_tokens",
    "all_gather_data_proto",
    "collate_fn",
    "compute_position_id_with_mask",
    "default_compute_score",
    "fold_batch_dim",
    "from_trajectories",
    "load_reward_manager",
    "pad_dataproto_to_divisor",
    "provide_verl",
    "read_parquet",
    "to_episodes",
    "to_labels",
    "to_tokens",
    "to_trajectories",
    "unfold_batch_dim",
    "union_tensor_dict",
    "unpad_dataproto",
    "write_parquet",
]
