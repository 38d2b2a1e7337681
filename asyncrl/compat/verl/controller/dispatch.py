"""Divides the arguments of a call among the workers, and joins their results to the result of the call.

A dispatch function gets the group and the call's arguments. It turns each argument into a list with one element per
worker. A collect function gets the group and the results of all workers, which are futures if the call does not wait.

Batches are divided into equal parts. A batch with padding enabled (`auto_padding=True`) is padded first, and the
padding is removed from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.futures import DataProtoFuture, is_future
from asyncrl.compat.verl.controller.modes import Dispatch
from asyncrl.errors import DispatchError

PADDING = "_padding_size_key_x123d"
"""The keyword argument in which a dispatch function returns the number of rows that it added.

The name is verl's, so that dispatch functions written for verl work.
"""
MEGATRON = "megatron"
"""The name of the mesh of the modes MEGATRON_COMPUTE and MEGATRON_COMPUTE_PROTO. A mesh is a division of models among
workers: it gives each worker a data-parallel rank."""

Arguments = tuple[Sequence[Any], dict[str, Any]]


class Workers(Protocol):
    """The part of a worker group that dispatch functions use."""

    @property
    def world_size(self) -> int: ...

    def dp_ranks(self, mesh: str) -> list[int]:
        """int[W]: the data-parallel rank of each worker in a mesh."""
        ...

    def collecting(self, mesh: str) -> list[bool]:
        """bool[W]: true if the worker returns the result of its data-parallel rank."""
        ...


class GivenPart(NamedTuple):
    """The number of rows in the part of a batch that a worker got."""

    rank: int
    rows: int


class Strategy(NamedTuple):
    """The two functions of a dispatch mode."""

    dispatch: Callable[..., Arguments]
    collect: Callable[[Workers, Any], Any]


def strategy_of(mode: Dispatch | Mapping[str, Callable[..., Any]]) -> Strategy:
    """The two functions of a dispatch mode."""
    if isinstance(mode, Dispatch):
        return STRATEGIES[mode]
    return Strategy(mode["dispatch_fn"], mode["collect_fn"])


def to_all(group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    """Give every worker all arguments."""
    size = group.world_size
    return [[each] * size for each in args], {name: [each] * size for name, each in kwargs.items()}


def as_given(group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def as_returned(group: Workers, output: Any) -> Any:
    return output


def one_each(group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    """Give worker i the element i of each argument. Each argument is a list [W]. Raises DispatchError: a list has
    another length."""
    return _lists(args, kwargs, group.world_size, "workers")


def divided(group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    """Give each worker its part of each batch. Raises DispatchError: an argument is not a batch, or cannot be
    divided."""
    return split(group.world_size, args, kwargs)


def divided_with_function(group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    """Divide like `divided`, but give the first argument, a function, to every worker.

    Raises DispatchError: the first argument is not a function.
    """
    if not args or not callable(args[0]):
        raise DispatchError("the first argument must be a function, which every worker gets")
    parts, named = split(group.world_size, args[1:], kwargs)
    return [[args[0]] * group.world_size, *parts], named


def over_mesh(mesh: str, group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    """Give the workers of data-parallel rank d the element d of each argument. Each argument is a list with an element
    for each data-parallel rank.

    Raises DispatchError: a list has another length.
    """
    ranks = group.dp_ranks(mesh)
    return _by_rank(ranks, *_lists(args, kwargs, max(ranks) + 1, f"data-parallel ranks of the mesh {mesh!r}"))


def divided_over_mesh(mesh: str, group: Workers, *args: Any, **kwargs: Any) -> Arguments:
    """Give the workers of data-parallel rank d the part d of each batch.

    Raises DispatchError: an argument is not a batch, or cannot be divided.
    """
    ranks = group.dp_ranks(mesh)
    parts, named = split(max(ranks) + 1, args, kwargs)
    padding = {PADDING: named.pop(PADDING)} if PADDING in named else {}
    own, own_named = _by_rank(ranks, parts, named)
    return own, own_named | padding


def joined(group: Workers, output: Sequence[Any]) -> DataProto | DataProtoFuture:
    """The workers' batches joined in the order of the workers. Raises DispatchError: a worker returned no batch."""
    if all(is_future(each) for each in output):
        return DataProtoFuture.concat(output)
    kinds = sorted({type(each).__name__ for each in output if not isinstance(each, DataProto)})
    if kinds:
        raise DispatchError(f"workers must return batches (DataProto) to be joined; some returned {', '.join(kinds)}")
    whole: DataProto = DataProto.concat(output)
    return whole


def from_mesh(mesh: str, group: Workers, output: Sequence[Any]) -> list[Any]:
    """The results of the collecting workers, in the order of their data-parallel ranks.

    Raises DispatchError: a data-parallel rank has no collecting worker, or several.
    """
    ranks, collecting = group.dp_ranks(mesh), group.collecting(mesh)
    found = sorted((rank, index) for index, rank in enumerate(ranks) if collecting[index])
    if [rank for rank, _ in found] != list(range(max(ranks) + 1)):
        raise DispatchError(
            f"in the mesh {mesh!r} the workers {[index for _, index in found]} collect, for the data-parallel ranks "
            f"{[rank for rank, _ in found]}: each of the {max(ranks) + 1} ranks needs exactly one worker that collects"
        )
    return [output[index] for _, index in found]


def joined_from_mesh(mesh: str, group: Workers, output: Sequence[Any]) -> DataProto | DataProtoFuture:
    """The batches of `from_mesh`, joined. Raises the errors of `from_mesh` and `joined`."""
    return joined(group, from_mesh(mesh, group, output))


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """verl's dispatch mode over a mesh that the workers have registered under `mesh_name`."""
    return {
        "dispatch_fn": partial(divided_over_mesh, mesh_name),
        "collect_fn": partial(joined_from_mesh, mesh_name),
    }


STRATEGIES: Mapping[Dispatch, Strategy] = {
    Dispatch.RANK_ZERO: Strategy(as_given, as_returned),
    Dispatch.ONE_TO_ALL: Strategy(to_all, as_returned),
    Dispatch.ALL_TO_ALL: Strategy(as_given, as_returned),
    Dispatch.DP_COMPUTE: Strategy(one_each, as_returned),
    Dispatch.DP_COMPUTE_PROTO: Strategy(divided, joined),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: Strategy(divided_with_function, joined),
    Dispatch.DP_COMPUTE_METRIC: Strategy(divided, as_returned),
    Dispatch.MEGATRON_COMPUTE: Strategy(partial(over_mesh, MEGATRON), partial(from_mesh, MEGATRON)),
    Dispatch.MEGATRON_COMPUTE_PROTO: Strategy(
        partial(divided_over_mesh, MEGATRON), partial(joined_from_mesh, MEGATRON)
    ),
}


def split(chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[list[Any]], dict[str, Any]]:
    """The `chunks` parts of each batch. If rows were added, the keyword argument PADDING has their number.

    Raises DispatchError: an argument is not a batch, or batches with padding differ in length. Raises DataProtoError: a
    batch without padding cannot be divided.
    """
    named = {f"argument {number}": each for number, each in enumerate(args)} | dict(kwargs)
    for name, each in named.items():
        if not isinstance(each, DataProto | DataProtoFuture):
            raise DispatchError(f"{name} is a {type(each).__name__}; only a DataProto can be divided among workers")
    lengths = {len(each) for each in named.values() if isinstance(each, DataProto) and each.is_padding_enabled()}
    if len(lengths) > 1:
        raise DispatchError(
            f"batches of {sorted(lengths)} rows cannot be padded together: they must have the same length"
        )
    padding = -lengths.pop() % chunks if lengths else 0

    def parts(value: DataProto | DataProtoFuture) -> list[Any]:
        if padding and isinstance(value, DataProto) and value.is_padding_enabled():
            # Pad a copy, so that the caller's batch does not change.
            own: DataProto = value[:]
            own.padding(padding)
            return own.chunk(chunks)
        return [*value.chunk(chunks)]

    found: dict[str, Any] = {name: parts(each) for name, each in kwargs.items()}
    return [parts(each) for each in args], found | ({PADDING: padding} if padding else {})


def parts_to_join(
    strategy: Strategy, group: Workers, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[GivenPart]:
    """The parts of a call whose results will be joined, in the order of the joined batch. Empty if the results are not
    joined here, or if the parts are not known yet."""
    ranks: Sequence[int] = ()
    match strategy.collect:
        case partial(func=function, args=(mesh,)) if function is joined_from_mesh:
            ranks = from_mesh(mesh, group, range(group.world_size))
        case function if function is joined:
            ranks = range(group.world_size)
    found = [each for each in (*args, *kwargs.values()) if isinstance(each, list)]
    batches = [each for each in found if all(isinstance(part, DataProto) for part in each)]
    return [GivenPart(rank, len(batches[0][rank])) for rank in ranks] if batches else []


def in_full(whole: Any, output: Any, parts: Sequence[GivenPart]) -> Any:
    """Return `whole`, the joined batch of the workers' `output`, after a check of its rows. If `whole` is a future, the
    check runs once the batch is there.

    Raises DispatchError: a worker returned fewer rows than its part has.
    """
    if not parts:
        return whole
    if isinstance(whole, DataProtoFuture):
        return replace(whole, collect_fn=partial(_joined_in_full, whole.collect_fn, parts))
    _require_rows([output[part.rank] for part in parts], parts)
    return whole


def _joined_in_full(
    join: Callable[[list[Any]], DataProto], parts: Sequence[GivenPart], results: list[Any]
) -> DataProto:
    whole = join(results)
    _require_rows(results, parts)
    return whole


def _require_rows(results: Sequence[DataProto], parts: Sequence[GivenPart]) -> None:
    for result, part in zip(results, parts, strict=True):
        # A batch without rows has only `meta_info`, such as metrics.
        if 0 < len(result) < part.rows:
            raise DispatchError(
                f"rank {part.rank} returned {len(result)} rows for the {part.rows} rows that it got; return a batch "
                "with a row for each, or use a dispatch mode that joins nothing"
            )


def without_padding(output: Any, padding: int) -> Any:
    """The result of a call without its last `padding` rows. Results other than batches are not changed."""
    if isinstance(output, DataProto):
        return output[: len(output) - padding]
    if isinstance(output, DataProtoFuture):
        return DataProtoFuture(output.collect_fn, output.futures, output.dispatch_fn, padding)
    return output


def _lists(args: Sequence[Any], kwargs: Mapping[str, Any], size: int, of: str) -> Arguments:
    named = {f"argument {number}": each for number, each in enumerate(args)} | dict(kwargs)
    for name, each in named.items():
        if not isinstance(each, list | tuple) or len(each) != size:
            length = f" of {len(each)}" if isinstance(each, list | tuple) else ""
            raise DispatchError(
                f"{name} is a {type(each).__name__}{length}; it must be a list with an element for each of the {size} "
                f"{of}"
            )
    return [list(each) for each in args], {name: list(each) for name, each in kwargs.items()}


def _by_rank(ranks: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    return (
        [[each[rank] for rank in ranks] for each in args],
        {name: [each[rank] for rank in ranks] for name, each in kwargs.items()},
    )
