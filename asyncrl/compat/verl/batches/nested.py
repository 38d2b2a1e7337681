"""Rows of tensors, which may be nested: a nested tensor [B, j] has rows of different lengths.

torch has nested tensors of two layouts. verl uses `torch.jagged`, and so does this package. torch implements few
operations for nested tensors, so these functions work on their rows one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import DataProtoError


def check_layout(name: str, tensor: Tensor) -> None:
    """Raises DataProtoError: the tensor is nested, but not jagged."""
    if tensor.is_nested and tensor.layout is not torch.jagged:
        raise DataProtoError(f"{name!r} is a nested tensor of layout {tensor.layout}; make it with layout=torch.jagged")


def ragged_dimension(nested: Tensor) -> int:
    """The dimension in which the rows differ in length."""
    ragged: int = nested._ragged_idx  # type: ignore[attr-defined]
    return ragged


def of_rows(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """The nested tensor with these rows, whose lengths differ in the same dimension as in `like`.

    If `rows` is empty, the result has the dtype, the device and the other sizes of `like`.
    """
    dimension = ragged_dimension(like)
    lengths = torch.tensor([0, *(row.shape[dimension - 1] for row in rows)])
    values = torch.cat(list(rows), dimension - 1) if rows else like.values().narrow(dimension - 1, 0, 0)
    return nested_of(values, lengths.cumsum(0).to(values.device), dimension)


def nested_of(values: Tensor, offsets: Tensor, dimension: int) -> Tensor:
    """The nested tensor whose row i is `values` from `offsets[i]` to `offsets[i + 1]`.

    `values` are divided in their dimension `dimension - 1`, so rows differ in the dimension `dimension` of the result.
    """
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dimension)
    return nested


def parts(nested: Tensor) -> tuple[Tensor, Tensor, int]:
    """The arguments of `nested_of` for this tensor."""
    packed = of_rows(nested.unbind(), nested)
    offsets: Tensor = packed.offsets()  # type: ignore[attr-defined]
    return packed.values(), offsets, ragged_dimension(nested)


def chosen(tensor: Tensor, key: Any) -> Tensor:
    """`tensor[key]`, with a slice, a mask or indices of rows as the key."""
    if not tensor.is_nested:
        return tensor[key]
    rows = tensor.unbind()
    return of_rows([rows[row] for row in torch.arange(len(rows))[key].tolist()], tensor)


def joined(tensors: Sequence[Tensor], name: str) -> Tensor:
    """The rows of all tensors, in order. Raises DataProtoError, which names `name`: only some tensors are nested, or
    they are nested in different dimensions."""
    kinds = {ragged_dimension(each) if each.is_nested else None for each in tensors}
    if kinds == {None}:
        return torch.cat(list(tensors))
    if len(kinds) > 1:
        raise DataProtoError(f"batches to be joined have {name!r} as different kinds of tensors: {_kinds(tensors)}")
    return of_rows([row for each in tensors for row in each.unbind()], tensors[0])


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(
        f"nested in dimension {ragged_dimension(each)}" if each.is_nested else "not nested" for each in tensors
    )


def same(left: Tensor, right: Tensor) -> bool:
    """True if both tensors have the same shape and content."""
    if left.is_nested != right.is_nested:
        return False
    if not left.is_nested:
        return torch.equal(left, right)
    return len(left) == len(right) and all(map(torch.equal, left.unbind(), right.unbind()))
