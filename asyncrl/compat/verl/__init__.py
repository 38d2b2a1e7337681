"""verl's batch type and what goes with it, under verl's names. docs/verl.md says what carries over."""

from asyncrl.compat.verl.padding import compute_position_id_with_mask, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.compat.verl.protocol import DataProto, DataProtoItem
from asyncrl.compat.verl.tensors import TensorBatch

__all__ = [
    "DataProto",
    "DataProtoItem",
    "TensorBatch",
    "compute_position_id_with_mask",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
