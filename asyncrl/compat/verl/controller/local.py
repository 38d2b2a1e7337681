"""Workers in threads of this process, without Ray: for tests, or for one worker on a laptop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.group import ClassWithInitArgs, ResourcePool, WorkerGroup, run_method, worker_error
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.errors import DispatchError
from asyncrl.machine.process import is_ctrl_c


class LocalWorkerGroup(WorkerGroup):
    """Workers in threads of this process: as many as `resource_pool` has processes, by default one.

    The workers share this process and its single torch.distributed group, so several workers cannot train one model
    together. Arguments and results are copied.

    Raises DispatchError: the pool has no process, or the class is not a class of workers. Passes on Exceptions of the
    workers' constructor. If the constructor raises something else, such as SystemExit, raises a WorkerError that names
    the rank.
    """

    def __init__(self, class_with_args: ClassWithInitArgs, resource_pool: ResourcePool | None = None) -> None:
        cls = class_with_args.cls
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise DispatchError(
                f"{getattr(cls, '__qualname__', repr(cls))} is not a class of workers: derive it from Worker of "
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
                    self._workers.append(_made(class_with_args, rank, pool.world_size))
                unless_all_are_made.callback(self._workers[-1].close)
            unless_all_are_made.pop_all()
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"worker-{rank}") for rank in range(pool.world_size)]

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Future[Any]:
        own = [_own(each) for each in args]
        own_kwargs = {name: _own(each) for name, each in kwargs.items()}

        def work() -> Any:
            return _own(run_method(self._workers[rank], method_name, own, own_kwargs))

        return self._threads[rank].submit(work)

    def _end(self) -> None:
        with ExitStack() as stack:
            for worker, thread in zip(self._workers, self._threads, strict=True):
                stack.callback(thread.shutdown)
                stack.callback(thread.submit(worker.close).result)


def _made(class_with_args: ClassWithInitArgs, rank: int, size: int) -> Any:
    try:
        return class_with_args()
    except Exception:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        name = class_with_args.cls.__name__
        raise worker_error(f"rank {rank} of {size}: {name} failed to start", error) from error


def _own(value: Any) -> Any:
    """A copy of a value that a worker gets or returns, with copies of its tensors, arrays and containers.

    Then no worker changes the value of the caller or of another worker, as on Ray. Other objects are shared, not
    copied.
    """
    if isinstance(value, DataProto):
        batch = None if value.batch is None else value.batch.clone()
        return type(value)(batch, _own(value.non_tensor_batch), _own(value.meta_info))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        copy = value.copy()
        if value.dtype == object:
            for index, each in np.ndenumerate(value):
                copy[index] = _own(each)
        return copy
    if type(value) is dict:
        return {name: _own(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_own, value))
    return value


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
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
