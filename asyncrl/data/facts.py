"""Extracts facts about tasks, such as the data source and the split, as columns with the same types for all files. Ids
are made from these facts, and tasks are found by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.data.columns import fields, is_text
from asyncrl.types import Task

ENVIRONMENT = "environment"
"""The column with the name of a task's environment. If a row has no value there, the name is read from the field
`environment` of `extra_info`."""
USER = "interaction_kwargs"
_TEXT = pa.large_string()
FACTS = pa.schema([(name, _TEXT) for name in ("data_source", "split", "index", "environment", "user", "roles")])
"""`split`, `environment` and `user` are null if the row has no such value; `index` is also null if it is neither text
nor an integer. `roles` has the roles of the prompt's messages, separated by spaces.
"""


def facts_of_tasks(tasks: Iterable[Task]) -> pa.Table:
    """The facts of tasks."""
    return pa.Table.from_pylist([_facts(task) for task in tasks], FACTS)


def _facts(task: Task) -> dict[str, str | None]:
    extra = task.extra_info
    index, user = extra.get("index"), extra.get(USER)
    return {
        "data_source": task.data_source,
        "split": None if extra.get("split") is None else str(extra["split"]),
        "index": str(index) if isinstance(index, (str, int)) and not isinstance(index, bool) else None,
        "environment": _text(extra.get(ENVIRONMENT)),
        "user": _text(user.get("name")) if isinstance(user, dict) else None,
        "roles": " ".join(message["role"] for message in task.messages),
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def facts_of_table(table: pa.Table) -> pa.Table:
    """The facts of the rows of a table that `TableChecks` has checked."""
    environment = _extra(table, is_text, ENVIRONMENT)
    if ENVIRONMENT in table.column_names:
        environment = pc.coalesce(table.column(ENVIRONMENT).cast(_TEXT), environment)
    columns = [
        table.column("data_source").cast(_TEXT),
        _extra(table, lambda kind: True, "split"),
        _extra(table, lambda kind: pa.types.is_integer(kind) or is_text(kind), "index"),
        environment,
        _extra(table, is_text, USER, "name"),
        pa.chunked_array([_roles(chunk) for chunk in table.column("prompt").chunks], _TEXT),
    ]
    return pa.Table.from_arrays(columns, schema=FACTS)


def _extra(table: pa.Table, fits: Callable[[pa.DataType], bool], *path: str) -> pa.ChunkedArray:
    """The values at a path in `extra_info` as text; nulls if the path does not exist or its type does not fit."""
    kind = table.schema.field("extra_info").type if "extra_info" in table.column_names else pa.null()
    for name in path:
        kind = kind.field(name).type if name in fields(kind) else pa.null()
    if pa.types.is_null(kind) or not fits(kind):
        return pa.chunked_array([pa.nulls(len(table), _TEXT)])
    return pc.struct_field(table.column("extra_info"), list(path)).cast(_TEXT)


def _roles(prompts: pa.Array) -> pa.Array:
    roles = pc.struct_field(pc.list_flatten(prompts), "role").cast(pa.string())
    ends = accumulate(pc.list_value_length(prompts).to_pylist(), initial=0)
    return pc.binary_join(pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), roles), " ").cast(_TEXT)
