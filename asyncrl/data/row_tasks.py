"""Makes a task from a row in verl's layout. If the row has values that cannot be sent in a message, it is refused,
because it would stop a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.data.demonstrations import read_continuation
from asyncrl.data.facts import ENVIRONMENT
from asyncrl.data.layout import RowLayout
from asyncrl.data.row_images import IMAGES, with_images
from asyncrl.data.rows import TableFile
from asyncrl.data.sendable import check_depth, check_schema, message_of, schemas
from asyncrl.errors import DataError, WireError
from asyncrl.ids import task_id
from asyncrl.types import Task

REQUIRED = ("prompt", "data_source", "reward_model")
OPTIONAL = ("extra_info", "tools", ENVIRONMENT, IMAGES)
_IN_TASK = ("prompt", "data_source", "extra_info", IMAGES)
UNUSABLE = (WireError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""The errors that arise if a row cannot become a task, or has values that Python or a message cannot represent."""


def required_columns(demonstration: str | None) -> tuple[str, ...]:
    """The columns that task files must have, including the column `demonstration` if it is not None."""
    return REQUIRED if demonstration is None else (*REQUIRED, demonstration)


class Origin(NamedTuple):
    """A row's file, and the row's number counted over all files."""

    file: TableFile
    number: int

    @property
    def place(self) -> str:
        """The position as text, such as `a.jsonl: line 3`."""
        return self.file.place(self.number)


@dataclass(frozen=True, slots=True)
class RowReader:
    """Makes tasks from rows. `demonstration`: the column with demonstrations; None: there is no such column."""

    layout: RowLayout
    demonstration: str | None = None

    def task(self, values: Mapping[str, Any], origin: Origin, has_index: bool = False) -> Task:
        """The task of a row. With `has_index`, the task's id contains the row's `index`, else the row's number.

        Raises DataError: the row lacks a value, or no message can carry the row.
        """
        try:
            self._check(values, origin)
            task = self._task(values, origin, has_index)
            check_depth(task)
        except DataError:
            raise
        except UNUSABLE as error:
            raise unusable(origin.place, error) from error
        return task

    def _check(self, values: Mapping[str, Any], origin: Origin) -> None:
        for name in REQUIRED:
            if values.get(name) is None:
                raise DataError(f"{origin.place}, column {name} is null; mend or drop the row")
        if not isinstance(values["prompt"], list):
            raise ValueError("column prompt must be a list of messages, each with role and content")
        if not values["prompt"]:
            raise DataError(f"{origin.place}, column prompt has no messages; mend or drop the row")
        if not isinstance(values["reward_model"], Mapping):
            raise ValueError("column reward_model must be a struct with a field ground_truth")
        if values["reward_model"].get("ground_truth") is None:
            raise DataError(f"{origin.place}, column reward_model.ground_truth is null; mend or drop the row")

    def _task(self, values: Mapping[str, Any], origin: Origin, has_index: bool) -> Task:
        extra = dict(_struct("extra_info", values.get("extra_info")))
        if values.get(ENVIRONMENT) is not None:
            extra[ENVIRONMENT] = _name(ENVIRONMENT, values[ENVIRONMENT])
        _struct("extra_info.tools_kwargs", extra.get("tools_kwargs"))
        split = origin.file.path.stem if extra.get("split") is None else _name("extra_info.split", extra["split"])
        source = _name("data_source", values["data_source"])
        return Task(
            id=task_id(source, split, extra["index"] if has_index else origin.number),
            messages=self.layout.messages([_message(message) for message in _prompt(values, origin)]),
            ground_truth=values["reward_model"]["ground_truth"],
            data_source=source,
            tools=_tools(values.get("tools"), origin),
            extra_info=extra,
            demonstration=self._shown(values, origin),
            columns=self._others(values) if self.layout.whole_rows else {},
        )

    def _others(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns that the task must keep here, because none of its other fields keeps their values unchanged."""
        known = {*_IN_TASK, self.demonstration}
        if values["reward_model"] == {"style": "rule", "ground_truth": values["reward_model"]["ground_truth"]}:
            known.add("reward_model")
        return {name: value for name, value in values.items() if name not in known}

    def _shown(self, values: Mapping[str, Any], origin: Origin) -> Sequence[Mapping[str, Any]]:
        if self.demonstration is None:
            return ()
        try:
            return read_continuation(values.get(self.demonstration))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{origin.place}, column {self.demonstration}: {error}; mend it, or set it to null"
            ) from error


def unusable(place: str, error: Exception) -> DataError:
    """The error for a row that cannot be sent in a message."""
    return DataError(f"{place} cannot be sent: {error}; mend or drop the row")


def _struct(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a struct, as {{'name': 0}}, not {value!r:.50}")
    return value


def _name(column: str, value: Any) -> str:
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{column} must be text, not {value!r:.50}")
    return str(value)


def _prompt(values: Mapping[str, Any], origin: Origin) -> Sequence[Mapping[str, Any]]:
    if (images := values.get(IMAGES)) is None:
        return values["prompt"]  # type: ignore[no-any-return]
    try:
        return with_images(values["prompt"], images)
    except ValueError as error:
        raise DataError(f"{origin.place}, column {IMAGES}: {error}; mend or drop the row") from error


def _message(message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") is None:
        raise ValueError("column prompt has a message without a role")
    if not isinstance(message["role"], str):
        raise ValueError("in column prompt the role of a message must be text")
    made = message_of(message)
    # As in verl, each message that a user's code reads has the key `content`. The content is None if the message has
    # only tool calls.
    made.setdefault("content", None)
    return made


def _schemas(tool: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(tool, str):
        return schemas(tool)
    check_schema(tool)
    return (tool,)


def _tools(tools: Any, origin: Origin) -> Sequence[Mapping[str, Any]]:
    try:
        if isinstance(tools, str):
            return tuple(schemas(tools))
        return tuple(schema for tool in tools or () for schema in _schemas(tool))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{origin.place}, column tools is neither schemas nor JSON text: {error}; mend or drop the row"
        ) from error
