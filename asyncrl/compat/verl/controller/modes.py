"""verl's dispatch and execute modes, and the decorator `register`, which sets them for a method.

The dispatch mode decides how the arguments of a call are divided among the workers, and how the results are joined. The
execute mode decides which workers run the method. `dispatch.py` has the functions of each dispatch mode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from asyncrl.compat.verl.controller.futures import materialized
from asyncrl.errors import DispatchError

Method = TypeVar("Method", bound=Callable[..., Any])

ATTRIBUTE = "asyncrl_registration"
"""The attribute that holds the Registration of a registered method."""
STEPS = ("dispatch_fn", "collect_fn")
"""The keys of a dispatch mode that is given as a mapping."""


class Dispatch(Enum):
    """verl's dispatch modes. W is the number of workers, D the number of data-parallel ranks."""

    RANK_ZERO = "RANK_ZERO"
    """Only rank 0 gets the call, and its result is returned."""
    ONE_TO_ALL = "ONE_TO_ALL"
    """Every worker gets the same arguments; a list of W results is returned."""
    ALL_TO_ALL = "ALL_TO_ALL"
    """Worker i gets element i of each list if all arguments are lists [W]. Otherwise this works like ONE_TO_ALL."""
    DP_COMPUTE = "DP_COMPUTE"
    """Arguments are lists [W], and worker i gets element i of each list; a list of W results is returned."""
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    """Batches are divided among the W workers, and the returned batches are joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    """This works like DP_COMPUTE_PROTO, but the first argument is a function, which all workers get."""
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    """Batches are divided among the W workers; a list of W results is returned."""
    MEGATRON_COMPUTE = "MEGATRON_COMPUTE"
    """Arguments are lists [D]. All workers of data-parallel rank d get element d of each list. A list of D results is
    returned, each from the worker that collects for its data-parallel rank."""
    MEGATRON_COMPUTE_PROTO = "MEGATRON_COMPUTE_PROTO"
    """Batches are divided among the D data-parallel ranks, and the D returned batches are joined."""


class Execute(Enum):
    """The workers that run a method: all, or rank 0."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True, slots=True)
class Registration:
    """The modes by which a worker group calls a method. With `blocking=False`, a call returns futures at once.

    A dispatch mode of your own is a mapping with `dispatch_fn` and `collect_fn`.
    """

    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]]
    execute_mode: Execute
    blocking: bool


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Decorate a method of a worker, so that worker groups of its class have a method of that name.

    With `materialize_futures`, a worker that gets a DataProtoFuture waits for its batch before it runs the method.

    Raises DispatchError: a mode is invalid, or the two modes do not fit together.
    """
    _check(dispatch_mode, execute_mode)

    def decorate(method: Method) -> Method:
        def arguments(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
            if not materialize_futures:
                return args, kwargs
            return [materialized(each) for each in args], {name: materialized(each) for name, each in kwargs.items()}

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            args_now, kwargs_now = arguments(args, kwargs)
            return method(*args_now, **kwargs_now)

        @functools.wraps(method)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            args_now, kwargs_now = arguments(args, kwargs)
            return await method(*args_now, **kwargs_now)

        wrapper: Any = run_async if inspect.iscoroutinefunction(method) else run
        setattr(wrapper, ATTRIBUTE, Registration(dispatch_mode, execute_mode, blocking))
        return wrapper  # type: ignore[no-any-return]

    return decorate


def _check(dispatch_mode: Any, execute_mode: Any) -> None:
    if isinstance(dispatch_mode, Mapping):
        missing = [step for step in STEPS if not callable(dispatch_mode.get(step))]
        if missing:
            raise DispatchError(f"the dispatch mode {dict(dispatch_mode)!r} needs functions as {' and '.join(missing)}")
    elif not isinstance(dispatch_mode, Dispatch):
        names = ", ".join(f"Dispatch.{mode.name}" for mode in Dispatch)
        raise DispatchError(
            f"dispatch_mode is {dispatch_mode!r}; it must be one of {names}, or a mapping with {' and '.join(STEPS)}"
        )
    if not isinstance(execute_mode, Execute):
        raise DispatchError(f"execute_mode is {execute_mode!r}; it must be Execute.ALL or Execute.RANK_ZERO")
    alone = (Dispatch.RANK_ZERO, Dispatch.ALL_TO_ALL)
    if execute_mode is Execute.RANK_ZERO and isinstance(dispatch_mode, Dispatch) and dispatch_mode not in alone:
        raise DispatchError(
            f"execute_mode=Execute.RANK_ZERO runs only rank 0, but dispatch_mode={dispatch_mode} makes arguments for "
            "all workers: use Dispatch.RANK_ZERO"
        )


def registered(worker_class: type) -> dict[str, Registration]:
    """The registered methods of a class, by name."""
    found = {name: getattr(getattr(worker_class, name, None), ATTRIBUTE, None) for name in dir(worker_class)}
    return {name: registration for name, registration in found.items() if isinstance(registration, Registration)}
