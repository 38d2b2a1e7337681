"""Checks all rows of a table column by column. If a check fails, rows are read one by one to find the bad row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.data.columns import depth, fields, is_list, is_struct, is_text
from asyncrl.data.facts import ENVIRONMENT
from asyncrl.data.row_images import IMAGES, wrong_images
from asyncrl.data.row_tasks import REQUIRED
from asyncrl.data.sendable import MAX_DEPTH, schemas
from asyncrl.errors import DataError


@dataclass(frozen=True)
class TableChecks:
    """The checks of one table from the files `name`.

    `place` gives the position of a row as text. `read_all` reads all rows, and raises DataError at a bad row.
    """

    table: pa.Table
    name: str
    place: Callable[[int], str]
    read_all: Callable[[], None]

    def check(self) -> None:
        """Raises DataError, which names the column or the row that cannot be used."""
        self._check_names()
        self._check_columns()
        self._check_values()
        if "tools" in self.table.column_names:
            self._check_tools(self.table.column("tools"))
        if IMAGES in self.table.column_names:
            self._check_images()

    def _check_names(self) -> None:
        for name in ("data_source", ENVIRONMENT):
            if name in self.table.column_names:
                self._check_text(name, self.table.column(name))
        if "split" in self._fields("extra_info"):
            self._check_text("extra_info.split", pc.struct_field(self.table.column("extra_info"), "split"))

    def _check_text(self, name: str, values: pa.ChunkedArray) -> None:
        try:
            values.cast(pa.large_string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{self.name}: {name} must be text, not {values.type}: {error}") from error

    def _check_columns(self) -> None:
        if "ground_truth" not in self._fields("reward_model"):
            raise DataError(f"{self.name}: column reward_model must be a struct with a field ground_truth")
        prompts = self.table.column("prompt")
        if not is_list(prompts.type) or not {"role", "content"} <= set(fields(prompts.type.value_type)):
            raise DataError(f"{self.name}: column prompt must be a list of messages, each with role and content")
        if "extra_info" in self.table.column_names and not is_struct(self.table.schema.field("extra_info").type):
            raise DataError(f"{self.name}: column extra_info must be a struct, as {{'index': 0}}")
        for name in REQUIRED:
            self._check_rows(name, pc.is_null(self.table.column(name)), "is null")
        self._check_rows("prompt", pc.equal(pc.list_value_length(prompts), 0), "has no messages")
        truths = pc.struct_field(self.table.column("reward_model"), "ground_truth")
        self._check_rows("reward_model.ground_truth", pc.is_null(truths), "is null")

    def _check_values(self) -> None:
        prompts = self.table.column("prompt")
        messages = pc.list_flatten(prompts)
        if not is_text(prompts.type.value_type.field("role").type):
            raise DataError(f"{self.name}: in column prompt the role of a message must be text")
        if messages.null_count or pc.struct_field(messages, "role").null_count:
            self.read_all()
        if "tools_kwargs" in self._fields("extra_info"):
            kind = self.table.schema.field("extra_info").type.field("tools_kwargs").type
            if not is_struct(kind):
                raise DataError(f"{self.name}: extra_info.tools_kwargs must be a struct, tool by tool, not {kind}")
        if (deepest := max(depth(field.type) for field in self.table.schema)) > MAX_DEPTH:
            raise DataError(f"{self.name}: a column is nested {deepest} deep; at most {MAX_DEPTH} can be sent")
        try:
            self.table.validate(full=True)
        except pa.ArrowInvalid as error:
            self.read_all()
            raise DataError(f"{self.name} is damaged: {error}") from error
        for column in self.table.columns:
            self._check_times(column)

    def _check_times(self, values: pa.ChunkedArray) -> None:
        """Find times that Python cannot represent, because they have nanoseconds, an extreme year or an unknown time
        zone."""
        kind = values.type
        if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
            try:
                pc.unique(values).to_pylist()
            except (ValueError, TypeError, LookupError, OverflowError):
                self.read_all()
        elif is_list(kind):
            self._check_times(pc.list_flatten(values))
        else:
            for name in fields(kind):
                self._check_times(pc.struct_field(values, name))

    def _check_images(self) -> None:
        try:
            found = wrong_images(*(self.table.column(name).combine_chunks() for name in ("prompt", IMAGES)))
        except ValueError as error:
            raise DataError(f"{self.name}: column {IMAGES} {error}") from error
        if found is not None:
            row, reason = found
            raise DataError(f"{self.place(row)}, column {IMAGES}: {reason}; mend or drop the row")

    def _check_tools(self, tools: pa.ChunkedArray) -> None:
        """Check the column `tools`. Each distinct text is checked only once."""
        kind = tools.type
        if is_list(kind):
            tools, kind = pc.list_flatten(tools), kind.value_type
            if tools.null_count:
                self.read_all()
        if is_text(kind):
            try:
                for text in pc.unique(tools.drop_null()).to_pylist():
                    schemas(text)
            except ValueError:
                self.read_all()
        elif pa.types.is_struct(kind):
            if "function" in fields(kind):
                tools, kind = pc.struct_field(tools, "function"), kind.field("function").type
            types = {name: kind.field(name).type for name in fields(kind)}
            name, parameters = types.get("name", pa.null()), types.get("parameters", pa.null())
            typed = is_text(name) and (pa.types.is_struct(parameters) or pa.types.is_null(parameters))
            if not typed or tools.null_count or pc.struct_field(tools, "name").null_count:
                self.read_all()
        elif not pa.types.is_null(kind):
            raise DataError(f"{self.name}: column tools is neither schemas nor JSON text, but {tools.type}")

    def _check_rows(self, column: str, bad: pa.ChunkedArray, what: str) -> None:
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise DataError(f"{self.place(row)}, column {column} {what}; mend or drop the row")

    def _fields(self, column: str) -> list[str]:
        return fields(self.table.schema.field(column).type) if column in self.table.column_names else []
