"""`all_gather_data_proto`: every process of a group gets the rows of all processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.storage import packed_fields, unpacked_fields
from asyncrl.compat.verl.batches.tensors import TensorBatch


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Extend the batch, in place, to the rows of all processes, in the order of their ranks. `meta_info` stays.

    All batches must have the same fields and the same number of rows. Nothing is pickled, so arrays may only have
    values that `save_to_disk` can write.

    Raises DataProtoError: batches differ in fields, shapes or types, a tensor is nested, or an array has a value of
    another kind.
    """
    require(data.batch is not None, "the batch has no tensors")
    batch: TensorBatch = data.batch
    nested = [name for name, tensor in batch.items() if tensor.is_nested]
    require(not nested, f"the nested tensors {nested} cannot be gathered; pad them first")
    kinds = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in batch.items()}
    found = _gathered(packed_fields({"kinds": kinds, "arrays": data.non_tensor_batch}), process_group)
    parts = [unpacked_fields(each) for each in found]
    for rank, part in enumerate(parts):
        require(
            part["kinds"] == kinds and part["arrays"].keys() == data.non_tensor_batch.keys(),
            f"the batch of rank {rank} has {part['kinds']} and {list(part['arrays'])}; this one has {kinds} and "
            f"{list(data.non_tensor_batch)}",
        )
    device = _device(process_group)
    tensors = {
        name: torch.cat(_all(batch[name].to(device).contiguous(), process_group)).to(batch[name].device)
        for name in sorted(batch.keys())
    }
    data.batch = TensorBatch(tensors, len(batch) * len(parts), batch.device)
    data.non_tensor_batch = {
        name: np.concatenate([part["arrays"][name] for part in parts]) for name in data.non_tensor_batch
    }


def _all(tensor: Tensor, group: Any) -> list[Tensor]:
    received = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, tensor, group=group)
    return received


def _gathered(content: bytes, group: Any) -> list[bytes]:
    """The `content` of every process, in the order of their ranks."""
    device = _device(group)
    sizes = [int(each) for each in _all(torch.tensor([len(content)], device=device), group)]
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    received = _all(own.to(device), group)
    return [each.cpu().numpy().tobytes()[:size] for each, size in zip(received, sizes, strict=True)]


def _device(group: Any) -> torch.device:
    """The device whose tensors the group sends: a GPU for NCCL, else the CPU."""
    return torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")
