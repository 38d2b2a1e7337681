"""The dispatch modes of the operators.

For generation and scoring, a batch of any length is divided among workers without padding, since padded rows would be
wasted episodes. For training, each worker gets the whole batch, and computes the part that the learner's schedule
assigns to its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.dispatch import MEGATRON, Arguments, Workers, to_all
from asyncrl.compat.verl.controller.futures import DataProtoFuture, is_future, materialized

Join = Callable[[list[Any]], DataProto]
Mode = dict[str, Callable[..., Any]]

ROW = "row_of_the_batch"
"""The field int64[B] with the index of each row in the whole batch."""


def shared_out(bounds: Callable[[DataProto, int], list[int]], join: Join) -> Mode:
    """The mode in which `bounds` gives W workers their parts of a batch. Worker i gets the rows
    [bounds[i], bounds[i + 1]). A part may be empty.

    `join` makes the call's result from the results of all workers.
    """

    def dispatch(group: Workers, data: Any) -> Arguments:
        batch = materialized(data)
        ends = bounds(batch, group.world_size)
        return [[batch[start:end] for start, end in pairwise(ends)]], {}

    return {"dispatch_fn": dispatch, "collect_fn": partial(_collected, join)}


def shared_among_collecting(bounds: Callable[[DataProto, int], list[int]], join: Join) -> Mode:
    """Like `shared_out`, but only the workers that collect get rows. There is one for each data-parallel rank."""

    def dispatch(group: Workers, data: Any) -> Arguments:
        batch = materialized(data)
        ranks = group.dp_ranks(MEGATRON)
        ends = bounds(batch, max(ranks) + 1)
        parts = zip(ranks, group.collecting(MEGATRON), strict=True)
        return [[batch[ends[rank] : ends[rank + 1]] if collects else batch[:0] for rank, collects in parts]], {}

    return {"dispatch_fn": dispatch, "collect_fn": partial(_collected, join)}


def whole(join: Join) -> Mode:
    """The mode in which every worker gets the whole batch, and `join` makes the call's result from all results."""
    return {"dispatch_fn": to_all, "collect_fn": partial(_collected, join)}


def _collected(join: Join, group: Workers, output: Sequence[Any]) -> DataProto | DataProtoFuture:
    if all(is_future(each) for each in output):
        return DataProtoFuture(join, list(output))
    return join(list(output))


def evenly(data: DataProto, workers: int) -> list[int]:
    """int[W + 1]: the bounds of W parts of a batch. The lengths of the parts differ by at most one row."""
    return [len(data) * worker // workers for worker in range(workers + 1)]


def by_trajectory(data: DataProto, workers: int) -> list[int]:
    """int[W + 1]: the bounds of W parts of a batch. All rows of a trajectory are in one part."""
    names = data.non_tensor_batch.get("trajectory_id", np.arange(len(data))).tolist()
    starts = [row for row in range(len(data)) if row == 0 or names[row] != names[row - 1]]
    starts.append(len(data))
    return [starts[(len(starts) - 1) * worker // workers] for worker in range(workers + 1)]


def in_order(parts: list[DataProto]) -> DataProto:
    """The rows of all parts, sorted by the field ROW, which is removed."""
    joined: DataProto = DataProto.concat([part for part in parts if len(part)])
    rows = joined.batch.pop(ROW)
    ordered: DataProto = joined[torch.argsort(rows)]
    return ordered


def the_first(parts: list[DataProto]) -> DataProto:
    """The result of rank 0, since all ranks return the same."""
    return parts[0]
