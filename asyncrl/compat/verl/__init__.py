"""The batch type, reward managers and interactions of verl under its names, for programs that were written for it.

asyncrl's trajectories can be converted to verl's layout and back. docs/verl.md lists the differences.
"""

from asyncrl.compat.verl.auto_padding import DataProtoConfig
from asyncrl.compat.verl.batch_dimensions import collate_fn, fold_batch_dim, unfold_batch_dim, union_tensor_dict
from asyncrl.compat.verl.from_batch import to_labels, to_trajectories
from asyncrl.compat.verl.gathering import all_gather_data_proto
from asyncrl.compat.verl.interactions import BaseInteraction
from asyncrl.compat.verl.loading import VerlInteraction, VerlManager, load_reward_manager
from asyncrl.compat.verl.names import provide_verl
from asyncrl.compat.verl.packed import add_tokens, to_episodes, to_tokens
from asyncrl.compat.verl.padding import compute_position_id_with_mask, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.compat.verl.parquet import read_parquet, write_parquet
from asyncrl.compat.verl.process_rewards import QwenPRMRewardManager, SkyworkPRMRewardManager
from asyncrl.compat.verl.protocol import DataProto
from asyncrl.compat.verl.reward_loop import RewardManagerBase
from asyncrl.compat.verl.reward_managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from asyncrl.compat.verl.rewarding import AbstractRewardManager, RewardManager, default_compute_score
from asyncrl.compat.verl.rollouts import BaseRollout
from asyncrl.compat.verl.rows import DataProtoItem
from asyncrl.compat.verl.tensors import TensorBatch
from asyncrl.compat.verl.to_batch import from_trajectories

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
