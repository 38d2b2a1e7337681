"""Maps columns of files to fields of tasks, for files that are not in verl's layout.

`columns` maps a field to its column. The fields are `prompt` (messages, or text that becomes a user message),
`ground_truth`, `data_source`, `tools`, `environment` and `images`; any other name becomes `extra_info.NAME`. Dots name
a column within a struct. If a field is not mapped, it is read from its place in verl's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.errors import DataError
from asyncrl.types import TEXT_PROMPT

TRUTH = "ground_truth"
_WHOLE = ("prompt", "data_source", "tools", "environment", "images")
"""Fields that are top-level columns in verl's layout."""


@dataclass(frozen=True)
class RowLayout:
    """The mapping `columns`, which is empty for files in verl's layout, and a `system_prompt`.

    The system prompt is added to tasks without a system message. With `whole_rows`, tasks keep all columns of a file.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    whole_rows: bool = False

    def kept(self, wanted: Sequence[str], names: Iterable[str]) -> list[str]:
        """The columns among `names` (of verl's layout) from which tasks are made: those in `wanted`, or with
        `whole_rows` all of them."""
        others = [name for name in names if name not in wanted] if self.whole_rows else []
        known = {*names}
        return [*(name for name in wanted if name in known), *others]

    def messages(self, given: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages of a task, with the system prompt."""
        if self.system_prompt is None or any(each["role"] == "system" for each in given):
            return given
        return [{"role": "system", "content": self.system_prompt}, *given]

    def read(self, wanted: Sequence[str], names: Sequence[str]) -> list[str]:
        """The columns among a file's `names` that must be read to make the columns `wanted` of verl's layout."""
        needed = {*wanted, *(path.split(".")[0] for path in self.columns.values())}
        return [name for name in names if self.whole_rows or name in needed]

    def applied(self, table: pa.Table, place: str, name: str, first: int = 0) -> pa.Table:
        """The rows in verl's layout. `name` is the data source if the file has no column for it, and `first` is the
        number of the first row.

        Raises DataError, which names the file `place`: a column is missing, or has values that its field cannot have,
        or a row has no prompt or ground truth.
        """
        if not self.columns:
            return table
        self.check(place, table.schema.names, lambda path: _has(table.schema, path))
        for path in self._needed:
            if (row := pc.index(pc.is_null(_at(table, path)), True).as_py()) >= 0:
                raise _without_value(f"{place}: row {first + row}", path)
        batches = [self._batch(batch, place, name) for batch in table.to_batches()]
        return pa.Table.from_batches(batches) if batches else pa.table({})

    def row(self, values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """One row in verl's layout. If the row has no data source, `name` is its data source."""
        if not self.columns:
            return values
        given = {wanted: value_at(values, path) for wanted, path in self.columns.items()}
        made = {each: value for each, value in values.items() if each not in given}
        made |= {each: given[each] for each in _WHOLE if each in given}
        if isinstance(made.get("prompt"), str):
            made["prompt"], given = [{"role": "user", "content": made["prompt"]}], {**given, TEXT_PROMPT: True}
        if TRUTH in given:
            made["reward_model"] = {TRUTH: given[TRUTH]}
        made.setdefault("data_source", name)
        if extra := {each: value for each, value in given.items() if each not in (*_WHOLE, TRUTH)}:
            before = made.get("extra_info")
            made["extra_info"] = {**before, **extra} if isinstance(before, Mapping) else extra
        return made

    def check_row(self, values: Mapping[str, Any], place: str) -> None:
        """Raises DataError, which names the row `place`: it has no value in a column of the prompt or ground truth."""
        for path in self._needed:
            if value_at(values, path) is None:
                raise _without_value(place, path)

    @property
    def _needed(self) -> list[str]:
        """The columns in which every row must have a value."""
        return [self.columns[field] for field in ("prompt", TRUTH) if field in self.columns]

    def check(self, place: str, names: Iterable[str], has: Callable[[str], bool]) -> None:
        """Raises DataError: the file `place` lacks a column that the layout names."""
        for wanted, path in self.columns.items():
            if not has(path):
                raise DataError(
                    f"{place} has no column {path}, which data.columns gives for {wanted}; it has "
                    f"{', '.join(sorted(names))}"
                )

    def _batch(self, batch: pa.RecordBatch, place: str, name: str) -> pa.RecordBatch:
        values = {wanted: _at(batch, path) for wanted, path in self.columns.items()}
        made = {each: batch.column(each) for each in batch.schema.names if each not in values}
        made |= {each: values[each] for each in _WHOLE if each in values}
        if "prompt" in values:
            made["prompt"] = _messages(values["prompt"])
            if made["prompt"] is not values["prompt"]:
                values[TEXT_PROMPT] = pa.repeat(True, batch.num_rows)
        if TRUTH in values:
            made["reward_model"] = pa.StructArray.from_arrays([values[TRUTH]], [TRUTH])
        if "data_source" not in made:
            made["data_source"] = pa.repeat(name, batch.num_rows)
        if extra := {each: array for each, array in values.items() if each not in (*_WHOLE, TRUTH)}:
            made["extra_info"] = _with_fields(made.get("extra_info"), extra, place)
        return pa.RecordBatch.from_pydict(made)


AS_THEY_ARE = RowLayout()
"""No mapping, for files in verl's layout."""


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a path with dots; None if the row has no such value."""
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def has_path(values: Mapping[str, Any], path: str) -> bool:
    """True if the row has a column at a path with dots. Its value may be null."""
    before, _, name = path.rpartition(".")
    found = value_at(values, before) if before else values
    return isinstance(found, Mapping) and name in found


def _has(schema: pa.Schema, path: str) -> bool:
    root, *inner = path.split(".")
    if root not in schema.names:
        return False
    kind = schema.field(root).type
    for name in inner:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return False
        kind = kind.field(name).type
    return True


def _without_value(place: str, column: str) -> DataError:
    return DataError(f"{place} has no value in column {column}; mend or drop the row")


def _at(rows: pa.Table | pa.RecordBatch, path: str) -> pa.Array | pa.ChunkedArray:
    root, *inner = path.split(".")
    column = rows.column(root)
    return pc.struct_field(column, inner) if inner else column


def _messages(values: pa.Array) -> pa.Array:
    """The `values` of a prompt column as messages. A text becomes a user message; messages stay unchanged."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return values
    texts = values.cast(pa.large_string())
    roles = pa.repeat(pa.scalar("user"), len(texts))
    messages = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    return pa.LargeListArray.from_arrays(pa.array(range(len(texts) + 1), pa.int64()), messages)


def _with_fields(extra: pa.Array | None, fields: Mapping[str, pa.Array], place: str) -> pa.Array:
    if extra is not None and not (pa.types.is_struct(extra.type) or pa.types.is_null(extra.type)):
        raise DataError(f"{place}: column extra_info must be a struct, as {{'index': 0}}")
    names = [] if extra is None or pa.types.is_null(extra.type) else [each.name for each in extra.type]
    arrays = {each: pc.struct_field(extra, each) for each in names}
    arrays |= fields
    return pa.StructArray.from_arrays(list(arrays.values()), list(arrays))
