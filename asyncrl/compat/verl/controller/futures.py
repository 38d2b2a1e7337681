"""Futures of workers' results: futures of threads in this process, or references of Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.protocol import DataProto


def is_future(value: Any) -> bool:
    """True if the value is the future of one worker's result."""
    return isinstance(value, Future) or _is_reference(value)


def _is_reference(value: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


def results(futures: Sequence[Any], what: str = "rank") -> list[Any]:
    """The results of workers, in order. Error messages name a future by `what` and its number, such as "rank 0".

    Raises WorkerError at the first failure, because the other workers may wait for the failed one.
    """
    if any(_is_reference(each) for each in futures):
        from asyncrl.compat.verl.controller.references import fetched

        return fetched(futures, what)
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for each in futures:
        if each in done:
            each.result()
    return [each.result() for each in futures]


@dataclass(frozen=True)
class DataProtoFuture:
    """A future batch, made of one future per worker.

    It may be passed to a method of another worker group. Then that group's workers wait for the batch, and the caller
    does not.

    `collect_fn` joins the workers' results. The last `padding` rows, which were added to divide the batch, are removed.
    `dispatch_fn` then takes this future's part of the batch. If it is None, the future is the whole batch.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: Sequence[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    padding: int = 0

    @staticmethod
    def concat(data: Sequence[Any]) -> DataProtoFuture:
        """The future of the joined batch."""
        return DataProtoFuture(_joined, list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Equal parts, in order, as futures."""
        return [replace(self, dispatch_fn=partial(_chunk, index=index, chunks=chunks)) for index in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the batch, or for this part of it.

        Raises WorkerError: a worker failed. Raises DataProtoError: the parts are not batches, or cannot be joined.
        """
        whole = self.collect_fn(results(self.futures, "the worker of part"))
        if self.padding:
            whole = whole[: -self.padding]
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


def _joined(parts: list[Any]) -> DataProto:
    for number, part in enumerate(parts):
        require(isinstance(part, DataProto), f"part {number} is a {type(part).__name__}; it must be a DataProto")
    whole: DataProto = DataProto.concat(parts)
    return whole


def _chunk(whole: DataProto, index: int, chunks: int) -> DataProto:
    return whole.chunk(chunks)[index]


def materialized(value: Any) -> Any:
    """The batch of a DataProtoFuture, after waiting for it. Any other value is returned unchanged."""
    return value.get() if isinstance(value, DataProtoFuture) else value
