"""A worker group: the caller's interface to W workers. It has every method that the workers' class registers."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from asyncrl.compat.verl.controller.dispatch import PADDING, in_full, parts_to_join, strategy_of, without_padding
from asyncrl.compat.verl.controller.futures import results
from asyncrl.compat.verl.controller.modes import Dispatch, Execute, Registration, registered
from asyncrl.errors import DispatchError, WorkerError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.text import message_of


class ResourcePool:
    """The number of processes on each node. `process_on_nodes=[4, 2]` means 4 on the first node and 2 on the second."""

    def __init__(self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10) -> None:
        self._store = list(process_on_nodes or ())
        self.max_colocate_count = max_colocate_count

    def add_node(self, process_count: int) -> None:
        self._store.append(process_count)

    def __call__(self) -> list[int]:
        return self._store

    @property
    def store(self) -> list[int]:
        return self._store

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """int[W]: for each process, the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """int[W]: the index of each process among the processes of its node."""
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A workers' class with the arguments of its constructor."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup(ABC):
    """W workers of `worker_class`. Every method that the class registers is a method of the group.

    `close` ends the workers, and so does the end of a `with` block.

    If a method fails on a worker, the caller gets a WorkerError that names the rank. Raises DispatchError: a registered
    method has the name of a method that every group has.
    """

    def __init__(self, worker_class: type) -> None:
        self._worker_class = worker_class
        self._closed = False
        self._dp_ranks: dict[str, list[int]] = {}
        self._collecting: dict[str, list[bool]] = {}
        self.method_names: list[str] = []
        for name, registration in registered(worker_class).items():
            if hasattr(type(self), name):
                raise DispatchError(
                    f"{worker_class.__name__}.{name} cannot be registered: worker groups have a method {name}"
                )
            setattr(self, name, self._bound(name, registration))
            self.method_names.append(name)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """A registered method, for type checkers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    def close(self) -> None:
        """End the workers. Later calls of registered methods are refused."""
        if not self._closed:
            self._closed = True
            self._end()

    @abstractmethod
    def _end(self) -> None:
        """End the workers."""

    @abstractmethod
    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Let a worker run a method after all calls that it got before. Return the future of the result."""

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on all workers, and return the futures of the results.

        If all arguments are lists [W], worker i gets element i of each list. Otherwise all workers get the same
        arguments.
        """
        given = [*args, *kwargs.values()]
        each_its_own = all(isinstance(each, list) and len(each) == self.world_size for each in given)

        def of(rank: int, value: Any) -> Any:
            return value[rank] if each_its_own else value

        return [
            self.submit(
                rank,
                method_name,
                [of(rank, each) for each in args],
                {name: of(rank, each) for name, each in kwargs.items()},
            )
            for rank in range(self.world_size)
        ]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """verl's second name for `execute_all`."""
        return self.execute_all(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The results of a method on all workers. Raises WorkerError: a worker failed."""
        return results(self.execute_all(method_name, *args, **kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on rank 0, and return the future of the result."""
        return self.submit(0, method_name, args, kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """verl's second name for `execute_rank_zero`."""
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a method on rank 0. Raises WorkerError: the worker failed."""
        return results([self.execute_rank_zero(method_name, *args, **kwargs)])[0]

    def dp_ranks(self, mesh: str) -> list[int]:
        """int[W]: the data-parallel rank of each worker in a mesh. Raises WorkerError: no worker knows the mesh."""
        if mesh not in self._dp_ranks:
            self._dp_ranks[mesh] = self.execute_all_sync("_query_dispatch_info", mesh)
        return self._dp_ranks[mesh]

    def collecting(self, mesh: str) -> list[bool]:
        """bool[W]: true if the worker returns the result of its data-parallel rank."""
        if mesh not in self._collecting:
            self._collecting[mesh] = self.execute_all_sync("_query_collect_info", mesh)
        return self._collecting[mesh]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """A group for each role in `prefix_set`, if this group has colocated workers. Its methods are those of the
        role's own class.

        The roles' groups use the workers of this group, so this group must stay open. Raises DispatchError: the workers
        have no such role.
        """
        roles: Mapping[str, ClassWithInitArgs] = getattr(self._worker_class, "roles", {})
        if unknown := sorted(set(prefix_set) - roles.keys()):
            raise DispatchError(
                f"{self._worker_class.__name__} has no role {', '.join(unknown)}; its roles are "
                f"{', '.join(roles) or 'none'}: make the class by create_colocated_worker_cls"
            )
        return {role: _RoleGroup(self, role, roles[role].cls) for role in prefix_set}

    def _bound(self, name: str, registration: Registration) -> Callable[..., Any]:
        strategy = strategy_of(registration.dispatch_mode)
        alone = registration.execute_mode is Execute.RANK_ZERO or registration.dispatch_mode is Dispatch.RANK_ZERO

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                raise DispatchError(f"{name}: the worker group is closed; make another one")
            own_args, own_kwargs = strategy.dispatch(self, *args, **kwargs)
            padding = own_kwargs.pop(PADDING, 0)
            parts = parts_to_join(strategy, self, own_args, own_kwargs)
            output: Any
            if alone:
                output = self.execute_rank_zero(name, *own_args, **own_kwargs)
                output = results([output])[0] if registration.blocking else output
            else:
                output = self.execute_all(name, *own_args, **own_kwargs)
                output = results(output) if registration.blocking else output
            whole = in_full(strategy.collect(self, output), output, parts)
            return without_padding(whole, padding)

        call.__name__ = call.__qualname__ = name
        return call


class _RoleGroup(WorkerGroup):
    """One role of the colocated workers of `whole`. Closing it leaves the workers running."""

    def __init__(self, whole: WorkerGroup, role: str, role_class: type) -> None:
        super().__init__(role_class)
        self._whole = whole
        self._role = role

    @property
    def world_size(self) -> int:
        return self._whole.world_size

    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._whole.submit(rank, self._name(method_name), args, kwargs)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._whole.execute_all(self._name(method_name), *args, **kwargs)

    def _name(self, method_name: str) -> str:
        if self._whole._closed:
            raise DispatchError(f"{method_name}: the group of the colocated workers is closed; make another one")
        return role_method(self._role, method_name)

    def _end(self) -> None:
        pass


def role_method(role: str, method_name: str) -> str:
    """The name of a role's method in the class of colocated workers."""
    return f"{role}_{method_name}"


def run_method(worker: Any, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a worker's method, which may be a coroutine. Raises WorkerError: it failed."""
    try:
        result = getattr(worker, method_name)(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        rank = f"rank {worker.rank} of {worker.world_size}"
        raise worker_error(f"{rank}: {type(worker).__name__}.{method_name} failed", error) from error


def worker_error(message: str, error: BaseException) -> WorkerError:
    """A WorkerError with the message and the reason. `error` becomes its cause if pickle can transport it."""
    message = f"{message}: {message_of(error)}"
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - bytes of this process
    except Exception:  # noqa: BLE001 - any error means that pickle cannot transport it
        return WorkerError(message)
    return WorkerError(message, error)
