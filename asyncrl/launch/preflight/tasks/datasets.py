"""Writes tasks into the run's folder at the start, if roles cannot read the sources of the tasks themselves.

It also writes the tasks that a user's dataset class (`data.dataset`) makes. Such a class has the interface of verl's
dataset classes.

The class is called as verl calls it: `Class(data_files=[...], tokenizer=..., config=..., processor=None)`. The object
has a length, and its rows have `raw_prompt` or `prompt` (messages), `data_source`, `reward_model`, and may have
`extra_info`, `tools_kwargs`, `interaction_kwargs`, `index` and `tools`. Agent loops of verl get further values, except
tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import locations
from asyncrl.config.imports import imported
from asyncrl.config.schema import DataConfig, ModelConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.data.layout import AS_THEY_ARE
from asyncrl.data.made_rows import write_rows
from asyncrl.data.row_tasks import OPTIONAL, RowReader, required_columns
from asyncrl.data.sendable import plain
from asyncrl.data.sources import of_tasks, parts
from asyncrl.data.tables import find_files
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.run_folder import has_store
from asyncrl.machine.long_work import long_work
from asyncrl.machine.process import is_ctrl_c
from asyncrl.text import reason_of
from asyncrl.types import Task, without_nulls

log = logging.getLogger("asyncrl.train")

_IN_TASK = ("raw_prompt", "prompt", "data_source", "reward_model", "extra_info", "tools")
_SENDABLE = (str, int, float, Mapping, list, tuple, np.ndarray, np.generic)


def make_tasks(config: TrainConfig, sources: Sequence[str], anew: bool = True) -> None:
    """Write the tasks of `sources` into the run's folder, if a class makes them or roles cannot read the sources
    themselves. With `anew` existing tasks are written again, since the class or the sources may have changed. A run
    with a store always keeps its tasks, because its episodes refer to them.

    Raises ConfigError: the class cannot be used; DataError: a row cannot be used.
    """
    tasks, run_dir = run_tasks(config), locations.run_dir(config.run)
    path = tasks.made_file(sources)
    if path is None or (path.exists() and not anew):
        return
    if path.exists() and has_store(run_dir):
        log.info("%s keeps the tasks of its first start; to make them again, choose another run.name", run_dir)
        return
    if config.data.dataset is None:
        shown, layout = tasks.demonstration(sources), tasks.layout
        given = (part for source in sources for part in parts(source, required_columns(shown), OPTIONAL, layout))
        with long_work(f"reading {', '.join(sources)}", 0, "rows") as advance:
            rows = write_rows(path, given, RowReader(layout, shown), advance)
        log.info("%s has %d tasks of %s", path, rows, ", ".join(sources))
        return
    data, open_it = config.data, partial(_opened, config.data, config.model, config.actor.max_tokens, config.run.seed)
    _make_by_class(str(data.dataset), sources, path, open_it, tasks.whole_rows)


def _make_by_class(
    name: str, sources: Sequence[str], path: Path, opened: Callable[[Sequence[str]], Any], whole_rows: bool
) -> None:
    """Write the rows of the class `name`. `opened` makes an object of the class for the sources.

    With `whole_rows`, tasks keep all values of a row except tensors.
    """
    try:
        dataset = opened(sources)
        # A loop over the object itself may never end, because the class need not raise IndexError.
        tasks = [_read(dataset, row, whole_rows) for row in range(len(dataset))]
        if not tasks:
            raise DataError(f"data.dataset={name} has no rows of {', '.join(sources)}")
        write_rows(path, of_tasks(str(path), tasks), RowReader(AS_THEY_ARE))
    except (ConfigError, DataError):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"data.dataset={name} failed: {reason_of(error)}") from error
    log.info("data.dataset=%s made %d tasks of %s", name, len(tasks), ", ".join(sources))


def _opened(data: DataConfig, model: ModelConfig, max_tokens: int, seed: int, sources: Sequence[str]) -> Any:
    """Make an object of the class `data.dataset`, with the arguments that verl gives."""
    from omegaconf import OmegaConf

    from asyncrl.modelling.tokenizer import open_tokenizer

    assert data.dataset is not None
    cls = imported(data.dataset, f"data.dataset={data.dataset}", "package.module.Class")
    # The class reads files of any kind, but knows no patterns and no names of the hub, so their files are found here.
    files = [str(file) for source in sources for file in ([source] if Path(source).exists() else find_files(source))]
    given = {
        "train_files": list(data.train),
        "val_files": list(data.eval or []),
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "max_prompt_length": data.max_prompt_length,
        "max_response_length": max_tokens,
        "truncation": data.truncation,
        # asyncrl leaves out or cuts long prompts later, when it also counts the tokens of the tools that an actor
        # shows.
        "filter_overlong_prompts": False,
        "return_raw_chat": True,
        "shuffle": data.shuffle,
        "seed": seed,
        **data.dataset_params,
    }
    return cls(data_files=files, tokenizer=open_tokenizer(model), config=OmegaConf.create(given), processor=None)


def _read(dataset: Any, row: int, whole_rows: bool) -> Task:
    """Return the task of a row. Raises DataError, which names the row."""
    try:
        return _task(row, dataset[row], whole_rows)
    except DataError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise DataError(f"data.dataset={type(dataset).__qualname__} failed: row {row}: {reason_of(error)}") from error


def _task(row: int, values: Mapping[str, Any], whole_rows: bool) -> Task:
    """Return the task of a row with these `values`. Raises DataError: a required value is missing."""
    prompt = without_nulls(plain(values.get("raw_prompt", values.get("prompt"))))
    truth = plain(values.get("reward_model") or {}).get("ground_truth")
    if not isinstance(prompt, list) or not prompt or not all(isinstance(each, dict) for each in prompt):
        raise DataError(f"data.dataset: row {row} has no messages under raw_prompt or prompt")
    if values.get("data_source") is None or truth is None:
        raise DataError(f"data.dataset: row {row} has no data_source, or no reward_model with a ground_truth")
    extra = {"index": row, **plain(values.get("extra_info") or {})}
    if values.get("index") is not None:
        extra["index"] = plain(values["index"])
    for name in ("interaction_kwargs", "tools_kwargs"):
        if values.get(name):
            extra[name] = plain(values[name])
    tools = plain(values.get("tools") or ())
    return Task(
        id=str(row),
        messages=prompt,
        ground_truth=truth,
        data_source=str(values["data_source"]),
        tools=json.loads(tools) if isinstance(tools, str) else tools,
        extra_info=extra,
        columns=_further(values) if whole_rows else {},
    )


def _further(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row that no other field of a task has, except tensors and other objects of libraries."""
    return {
        name: plain(value) for name, value in values.items() if name not in _IN_TASK and isinstance(value, _SENDABLE)
    }
