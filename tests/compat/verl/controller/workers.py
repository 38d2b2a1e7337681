"""Workers that say what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.controller import Dispatch, Execute, Worker, make_nd_compute_dataproto_dispatch_fn, register


def rows(*values: int, auto_padding: bool = False) -> DataProto:
    """A batch with these numbers as its rows."""
    tensors, texts = {"x": torch.tensor(values)}, np.array([str(value) for value in values], dtype=object)
    return DataProto.from_dict(tensors, {"text": texts}, auto_padding=auto_padding)


def numbers(data: DataProto) -> list[int]:
    """The rows of such a batch, of which the two fields agree."""
    values: list[int] = data.batch["x"].tolist()
    assert [int(text) for text in data.non_tensor_batch["text"]] == values
    return values


class Reporter(Worker):
    """A worker whose methods are named after their dispatch modes. `calls` has the rows of each batch that it got."""

    def __init__(self, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1) -> None:
        super().__init__()
        self.init_mesh(tp_size, pp_size, cp_size)
        self._register_dispatch_collect_info("swapped", self.world_size - 1 - self.rank, True)
        self.calls: list[Any] = []

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, value: Any, other: Any = None) -> Any:
        return self.rank, value, other

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, data: DataProto) -> DataProto:
        return self._doubled(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def no_batch(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def dp_compute_metric(self, data: DataProto) -> Any:
        return {"rank": self.rank, "rows": numbers(data)}

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def megatron_compute(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def megatron_compute_proto(self, data: DataProto) -> DataProto:
        return self._doubled(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("swapped"))
    def swapped(self, data: DataProto) -> DataProto:
        return self._doubled(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("unknown"))
    def on_unknown_mesh(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return self._doubled(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.ALL, blocking=False)
    def rank_later(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def waited_for(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail_on(self, data: DataProto) -> DataProto:
        if 13 in numbers(data):
            raise ValueError("13 is unlucky")
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_field(self, data: DataProto) -> list[str]:
        data.batch["y"] = data.batch["x"]
        data.meta_info["seen"] = True
        return list(data.batch.keys())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> list[Any]:
        return self.calls

    def _doubled(self, data: DataProto) -> DataProto:
        values = numbers(data)
        self.calls.append(values)
        return rows(*(2 * value for value in values))


def seen_by(group: Any) -> Sequence[list[Any]]:
    """Return the rows of the batches that each worker got."""
    found: Sequence[list[Any]] = group.seen()
    return found
