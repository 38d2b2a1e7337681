"""Results that workers still compute: futures of workers in this process, or Ray's references."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncrl.compat.verl.fields import require
from asyncrl.compat.verl.protocol import DataProto


def is_future(value: Any) -> bool:
    """True if the value is a future of one worker, which a call of a worker group without waiting returns."""
    return isinstance(value, Future) or _is_reference(value)


def _is_reference(value: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


def results(futures: Sequence[Any], what: str = "rank") -> list[Any]:
    """The results of workers, in order. `what` names the owners of the futures in errors.

    Raises WorkerError as soon as a worker has failed: the other workers may wait for the failed one.
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
    """A batch whose parts are still computed by `futures`, one a worker.

    It may be the argument of another worker group's method: the workers of that group wait for it, not the caller.

    `collect_fn` joins the parts and `dispatch_fn` takes from the whole what one worker needs. The last `padding` rows
    of the whole are left out: they were added to divide the batch among workers.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: Sequence[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    padding: int = 0

    @staticmethod
    def concat(data: Sequence[Any]) -> DataProtoFuture:
        """The batch whose parts are these futures."""
        return DataProtoFuture(_joined, list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Equal parts, in order, as futures."""
        return [replace(self, dispatch_fn=partial(_chunk, index=index, chunks=chunks)) for index in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the batch, or for this part of it.

        Raises WorkerError: a worker failed; DataProtoError: the parts are no batches, or cannot be joined.
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
    """The batch of a DataProtoFuture; any other value as it is."""
    return value.get() if isinstance(value, DataProtoFuture) else value
