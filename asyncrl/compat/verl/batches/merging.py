"""Merges the fields of several batches into one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from asyncrl.errors import DataProtoError

T = TypeVar("T")
METRICS = "metrics"
"""The key of `meta_info` whose value may differ between workers. The value is a mapping, or a list of mappings."""


def united(ours: Mapping[str, T], theirs: Mapping[str, T], part: str, same: Callable[[T, T], bool]) -> dict[str, T]:
    """The entries of both mappings. Raises DataProtoError, which names `part`: a shared entry differs."""
    for name in ours.keys() & theirs.keys():
        if not same(ours[name], theirs[name]):
            raise DataProtoError(f"{part}[{name!r}] differs in the two batches")
    return {**ours, **theirs}


def equal(left: Any, right: Any, types: bool = True) -> bool:
    """True if two values have the same content, also within lists and mappings; nan equals nan.

    With `types` their types must be equal, too. Arrays and tensors must always have the same type.
    """
    if types and type(left) is not type(right):
        return False
    within = partial(equal, types=types)
    match left, right:
        case np.ndarray(), np.ndarray():
            if left.dtype != right.dtype or left.shape != right.shape:
                return False
            if left.dtype != object:
                return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
            return all(map(within, left.flat, right.flat))
        case torch.Tensor(), torch.Tensor():
            alike = left.dtype == right.dtype and left.shape == right.shape
            return alike and bool(torch.isclose(left, right, rtol=0, atol=0, equal_nan=True).all())
        case (np.ndarray() | torch.Tensor(), _) | (_, np.ndarray() | torch.Tensor()):
            return False
        case Mapping(), Mapping():
            return left.keys() == right.keys() and all(within(left[name], right[name]) for name in left)
        case list() | tuple(), list() | tuple():
            return len(left) == len(right) and all(map(within, left, right))
        case float() | np.floating(), float() | np.floating():
            return bool(left == right or (left != left and right != right))
    return left is right or bool(left == right)


def transposed(rows: Sequence[Mapping[str, T]], what: str) -> dict[str, list[T]]:
    """The list of values for each name. Raises DataProtoError, which names `what`: the names differ between rows."""
    if not rows:
        return {}
    for row in rows:
        if row.keys() != rows[0].keys():
            raise DataProtoError(
                f"batches to be joined have different {what}: {', '.join(rows[0])} and {', '.join(row)}"
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def merged_meta_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all `infos`. Each metric becomes the list of its values.

    Raises DataProtoError: an entry other than a metric differs, or the names of metrics differ.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for info in infos:
        found = info.get(METRICS)
        metrics += found if isinstance(found, list) else [] if found is None else [found]
        others = {name: value for name, value in info.items() if name != METRICS}
        merged = united(merged, others, "meta_info", partial(equal, types=False))
    return {**merged, METRICS: transposed(metrics, METRICS)} if metrics else merged
