"""verl's functions that collate single rows, fold rows into groups, unfold groups into rows, and unite batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from torch import Tensor

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.merging import transposed
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.rows import DataProtoItem
from asyncrl.compat.verl.batches.tensors import TensorBatch


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """The batch of single rows. As in verl, its arrays have dtype object, and it has no `meta_info`."""
    arrays = transposed([row.non_tensor_batch for row in x], "arrays")
    rows = [row.batch for row in x if row.batch is not None]
    batch = TensorBatch.stack(rows) if rows else None
    return DataProto(batch, {name: np.array(values, dtype=object) for name, values in arrays.items()})


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """The batch with fields [new_batch_size, B / new_batch_size, ...], made from fields [B, ...].

    Raises DataProtoError: the batch has no tensors, or `new_batch_size` does not divide B. Raises RuntimeError, as verl
    does: a tensor is nested.
    """
    require(data.batch is not None, "the batch has no tensors")
    require(len(data) % new_batch_size == 0, f"{len(data)} rows do not divide into {new_batch_size} equal groups")
    if nested := sorted(name for name, tensor in data.batch.items() if tensor.is_nested):
        raise RuntimeError(
            f"{nested} have rows of different lengths, and cannot be folded into groups: pad them "
            "(torch.nested.to_padded_tensor), or take them out (pop)"
        )
    shape = (new_batch_size, len(data) // new_batch_size)
    tensors = {name: tensor.reshape(*shape, *tensor.shape[1:]) for name, tensor in data.batch.items()}
    arrays = {name: each.reshape(*shape, *each.shape[1:]) for name, each in data.non_tensor_batch.items()}
    return type(data)(TensorBatch(tensors, new_batch_size, data.batch.device), arrays, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The batch whose rows are the elements of the first `batch_dims` dimensions.

    If the tensors do not all have equal sizes in these dimensions, only the leading dimensions with equal sizes count.
    Of a nested tensor only the first dimension counts, so a batch with a nested tensor keeps its rows.

    Raises DataProtoError: the batch has no tensors. Raises ValueError: an array cannot be reshaped to these rows.
    """
    require(data.batch is not None, "the batch has no tensors")
    shared = _shared_shape(list(data.batch.values()), batch_dims)
    rows = int(np.prod(shared))
    tensors = {
        name: tensor if tensor.is_nested else tensor.reshape(rows, *tensor.shape[len(shared) :])
        for name, tensor in data.batch.items()
    }
    arrays = {name: each.reshape(rows, *each.shape[batch_dims:]) for name, each in data.non_tensor_batch.items()}
    return type(data)(TensorBatch(tensors, rows, data.batch.device), arrays, data.meta_info)


def _shared_shape(tensors: Sequence[Tensor], most: int) -> list[int]:
    sizes = zip(*(tensor.shape[: 1 if tensor.is_nested else most] for tensor in tensors), strict=False)
    return [each[0] for each in takewhile(lambda each: len(set(each)) == 1, sizes)]


def union_tensor_dict(tensor_dict1: TensorBatch, tensor_dict2: TensorBatch) -> TensorBatch:
    """Add the tensors of the second batch to the first one, in place, and return it.

    Raises DataProtoError: lengths differ, or a tensor that is in both differs.
    """
    DataProto(tensor_dict1).union(DataProto(tensor_dict2))
    return tensor_dict1
