"""Workers in threads of this process, without Ray: for tests, or for one worker on a laptop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from asyncrl.compat.verl.controller.group import ClassWithInitArgs, ResourcePool, WorkerGroup, run_method
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.compat.verl.protocol import DataProto
from asyncrl.errors import DispatchError


class LocalWorkerGroup(WorkerGroup):
    """Workers in threads of this process: as many as `resource_pool` has processes, by default one.

    The workers share this process's memory and its single torch.distributed group, so several workers cannot train one
    model together.

    Raises DispatchError: the pool has no process, or the class is none of workers. Passes on errors of the workers'
    constructor.
    """

    def __init__(self, class_with_args: ClassWithInitArgs, resource_pool: ResourcePool | None = None) -> None:
        cls = class_with_args.cls
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise DispatchError(
                f"{getattr(cls, '__qualname__', repr(cls))} is no class of workers: derive it from Worker of "
                "asyncrl.compat.verl.controller"
            )
        super().__init__(cls)
        pool = resource_pool or ResourcePool([1])
        if not pool.world_size:
            raise DispatchError(
                "the resource pool has no process: give the number of processes on each node, such as [1]"
            )
        self._workers: list[Any] = []
        places = zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
        with ExitStack() as unless_all_are_made:
            for rank, (local_rank, local_size) in enumerate(places):
                with environment(rank_variables(rank, pool.world_size, local_rank, local_size)):
                    self._workers.append(class_with_args())
                unless_all_are_made.callback(self._workers[-1].close)
            unless_all_are_made.pop_all()
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"worker-{rank}") for rank in range(pool.world_size)]

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Future[Any]:
        own = [_own(each) for each in args]
        own_kwargs = {name: _own(each) for name, each in kwargs.items()}
        return self._threads[rank].submit(run_method, self._workers[rank], method_name, own, own_kwargs)

    def _end(self) -> None:
        with ExitStack() as stack:
            for worker, thread in zip(self._workers, self._threads, strict=True):
                stack.callback(thread.shutdown)
                stack.callback(thread.submit(worker.close).result)


def _own(value: Any) -> Any:
    """A shallow copy of a batch, so that fields that a worker adds do not appear in the caller's batch."""
    if not isinstance(value, DataProto):
        return value
    batch = None if value.batch is None else value.batch.select(*value.batch.keys())
    return type(value)(batch, dict(value.non_tensor_batch), dict(value.meta_info))


def rank_variables(rank: int, world_size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """The environment variables that tell a worker its rank."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: str(number) for name, number in numbers.items()}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the `with` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
