"""The tasks of a run: those of its files, or those that a start made, without those whose prompts are too long.

A start makes tasks once where `data.dataset` makes them, where a source names no files, and where rows do not fit into
memory. It measures prompts once. It writes both into the run's folder. Every role that needs the tasks reads them
there, so that all roles and a resumed run have the same tasks in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.data.layout import RowLayout
from asyncrl.data.made_rows import SUFFIX, read_made
from asyncrl.data.reading import TaskFile
from asyncrl.data.sources import is_named
from asyncrl.errors import DataError


def open_tasks(config: TrainConfig, sources: Sequence[str]) -> TaskFile:
    """The tasks of `data.train` or `data.eval` (`sources`) that a run has.

    Raises DataError: they cannot be used, none is left, or no start has measured their prompts.
    """
    tasks, data = all_tasks(config, sources), config.data
    if data.max_prompt_length is None or not data.filter_overlong:
        return tasks
    return tasks.left(read_lengths(lengths_file(config, tasks), len(tasks)) <= data.max_prompt_length)


def read_lengths(path: Path, rows: int) -> NDArray[np.int32]:
    """The lengths int32[rows] that a start wrote. Raises DataError: it wrote none, or the file is damaged."""
    try:
        lengths: NDArray[np.int32] = np.load(path, allow_pickle=False)
        if lengths.shape != (rows,):
            raise ValueError(f"{path} has lengths {lengths.shape} of {rows} prompts")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"data.filter_overlong=true: the lengths of prompts cannot be read: {error}; `asyncrl train` measures them"
        ) from error
    return lengths


def all_tasks(config: TrainConfig, sources: Sequence[str]) -> TaskFile:
    """The tasks of `sources`, with those whose prompts are too long; training tasks have their demonstrations. Raises
    DataError: they cannot be used, or no start has made them."""
    layout, demonstration = layout_of(config), demonstration_of(config, sources)
    path = made_file(config, sources)
    if path is None:
        return TaskFile(sources, demonstration, layout)
    if not path.exists():
        raise DataError(f"{_made_by(config, sources)}: there is no {path}; `asyncrl train` makes it")
    # What was made is in verl's layout already. A class makes no demonstrations.
    layout = RowLayout({}, layout.system_prompt)
    return TaskFile(path, demonstration, layout, read_made(path))


def demonstration_of(config: TrainConfig, sources: Sequence[str]) -> str | None:
    """The column of `sources` that has demonstrations: training tasks alone have one."""
    return config.data.demonstration if sources == config.data.train else None


def layout_of(config: TrainConfig) -> RowLayout:
    """How files have the fields of tasks."""
    return RowLayout(config.data.columns, config.data.system_prompt)


def made_file(config: TrainConfig, sources: Sequence[str]) -> Path | None:
    """The file in the run's folder with the tasks that a start makes of `sources`; None: roles read the sources."""
    data = config.data
    if data.dataset is not None:
        digest = _digest([list(sources), data.dataset, data.dataset_params])
    elif not data.keep_in_memory or any(map(is_named, sources)):
        digest = _digest([list(sources), data.columns, demonstration_of(config, sources)])
    else:
        return None
    return locations.run_dir(config.run) / "tasks" / f"{digest}{SUFFIX}"


def _made_by(config: TrainConfig, sources: Sequence[str]) -> str:
    if config.data.dataset is not None:
        return f"data.dataset={config.data.dataset}"
    named = [source for source in sources if is_named(source)]
    return ", ".join(named) or f"data.keep_in_memory={str(config.data.keep_in_memory).lower()}"


def lengths_file(config: TrainConfig, tasks: TaskFile) -> Path:
    """The file in the run's folder with the length of each prompt, int32[rows]. Its name depends on all that the
    lengths depend on: the files with their sizes, the system prompt, the model, the tools and how the chat template
    shows them."""
    actor = config.actor
    made = tasks.made
    files = [(str(each.path), each.rows, 0 if made else each.path.stat().st_size) for each in tasks.files]
    if made is not None:
        files.append((made.name, len(tasks), made.stat().st_mtime_ns))
    policy = config.model
    model = [policy.path, policy.revision, policy.tokenizer, policy.chat_template]
    made_from = [
        files,
        *model,
        config.data.columns,
        config.data.system_prompt,
        actor.tools,
        actor.environment,
        actor.environments,
        actor.template_kwargs,
        actor.tool_call_format,
    ]
    return locations.run_dir(config.run) / "prompt_lengths" / f"{_digest(made_from)}.npy"


def _digest(made_from: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(made_from, default=str).encode()).hexdigest()[:16]
