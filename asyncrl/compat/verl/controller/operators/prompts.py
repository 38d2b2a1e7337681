"""Converts tasks to batches of prompts, in the order in which a run trains on them. Converts batches back to tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.compat.verl.batches.fields import columns, require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.to_batch import task_fields
from asyncrl.data.sendable import plain
from asyncrl.ids import feed_group, task_id
from asyncrl.replay.starts.feed import Feed
from asyncrl.types import Task


class _Counters:
    """An in-memory stand-in for the replay's store, with the counters that a feed without a difficulty band uses."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, by: int = 1) -> int:
        self._counts[name] += by
        return self._counts[name]

    def counter(self, name: str) -> int:
        return self._counts[name]


class TaskPrompts:
    """Tasks in the order in which a replay feeds them: `groups` per learner step, from learner step `step` on."""

    def __init__(
        self,
        tasks: Sequence[Task],
        groups: int,
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float],
        step: int = 0,
    ) -> None:
        self._groups = groups
        self._feed = Feed(tasks, seed, shuffle, weights)
        self._counters: Any = _Counters()
        for _ in range(step * groups):
            self._draw()

    def next(self, groups: int | None = None) -> DataProto:
        """One prompt for each of the next `groups` groups, by default the groups of one learner step.

        `DataProto.repeat` then makes one row for each member. `uid` is the group id that a replay would use.
        """
        drawn = [self._draw() for _ in range(self._groups if groups is None else groups)]
        rows = [prompt_fields(self._feed.tasks[row]) | {"uid": feed_group(number)} for number, row in drawn]
        return DataProto.from_dict(non_tensors=columns(rows))

    def _draw(self) -> tuple[int, int]:
        """The number of the next group, and the index of its task."""
        return self._feed.next(self._counters)


def prompt_fields(task: Task) -> dict[str, Any]:
    """The task as fields of one prompt row."""
    return {**task_fields(task), "task_id": task.id, "tools": [dict(tool) for tool in task.tools]}


def task_of(row: Mapping[str, Any], number: int) -> Task:
    """The task of row `number` of a batch, from the fields of verl's data sets.

    The fields are raw_prompt, data_source, reward_model, and optionally extra_info, tools_kwargs, tools and task_id.
    Without task_id, the id ends with the row's `index`. A row without an index has `row-NUMBER` there, so its id is not
    that of a row whose index is NUMBER.

    Raises DataProtoError: one of the first three is missing.
    """
    missing = [name for name in ("raw_prompt", "data_source", "reward_model") if row.get(name) is None]
    require(not missing, f"row {number} has no {', '.join(missing)}: pass the fields of verl's data sets")
    info = {**(row.get("extra_info") or {})}
    if row.get("tools_kwargs"):
        info["tools_kwargs"] = row["tools_kwargs"]
    split = "train" if info.get("split") is None else info["split"]
    index = f"row-{number}" if info.get("index") is None else info["index"]
    return Task(
        id=row.get("task_id") or task_id(row["data_source"], split, index),
        messages=list(row["raw_prompt"]),
        ground_truth=plain(row["reward_model"].get("ground_truth")),
        data_source=row["data_source"],
        tools=row.get("tools") or (),
        extra_info=plain(info),
    )


def tasks_of(data: DataProto) -> list[Task]:
    """The task of each row [B]. Raises the errors of `task_of`."""
    fields = data.non_tensor_batch
    return [task_of({name: values[row] for name, values in fields.items()}, row) for row in range(len(data))]
