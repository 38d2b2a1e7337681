"""Checks that every data source in `data.weights` has tasks. Without this check, the replay would refuse them later, at
its own start."""

from __future__ import annotations

from asyncrl.data.opening import RunTasks
from asyncrl.errors import DataError


def check_weights(shards: int, tasks: RunTasks) -> None:
    """Check that each of the replay's `shards` has a task of each data source in `data.weights`. `data.limit` and
    `data.filter_overlong` may leave out all tasks of a small source.

    Raises DataError: a shard would have none, or the training tasks cannot be read.
    """
    data, problems = tasks.data, list[str]()
    if not data.weights:
        return
    rows = tasks.usable(data.train).rows_by_source()
    limit = "" if data.limit is None else f" after data.limit={data.limit}"
    for source in data.weights:
        numbers = rows.get(source, [])
        if len({number % shards for number in numbers}) == shards:
            continue
        others = f"; it has tasks of {', '.join(sorted(rows))}"
        has = f"{len(numbers)} task{'s' if len(numbers) > 1 else ''}" if numbers else "no task"
        need = "" if shards == 1 else f", and each of replay.shards={shards} needs one"
        raise_limit = "" if data.limit is None else "raise data.limit or set it to null, "
        problems.append(
            f"data.weights names {source}, of which data.train has {has}{limit}{need}{'' if numbers else others}: "
            f"{raise_limit}add tasks of this data source, or leave it out of data.weights"
        )
    if problems:
        raise DataError("\n".join(problems))
