"""Records the demonstrations of all training tasks before anything starts, as actors will, so that none fails later."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.schema import ActorConfig, DataConfig
from asyncrl.errors import DataError, RefusedError, StoppedError
from asyncrl.machine.long_work import tracked
from asyncrl.types import Purpose, Ticket

if TYPE_CHECKING:
    from asyncrl.chat.chat import Chat
    from asyncrl.data.opening import RunTasks
    from asyncrl.data.reading import TaskFile


def check_group_demonstrations(
    run: RunTasks,
    actor: ActorConfig,
    open_chat: Callable[[], Chat],
    files: Sequence[TaskFile],
    stop: threading.Event | None = None,
) -> None:
    """Record the demonstrations of all training tasks, as actors will, unless they were recorded when the run was
    started before.

    Raises DataError: a demonstration cannot be recorded, or no task has one; StoppedError: `stop` was set meanwhile.
    """
    data = run.data
    if data.demonstration is None or not files:
        return
    (tasks,) = files
    from asyncrl.actor.from_config import demonstration_recorder

    done = run.run_dir / "demonstrations" / _tried_file(run.lengths_file(tasks), actor, data)
    if done.exists():
        return

    record, found = demonstration_recorder(actor, data, open_chat()), 0
    for row, task in enumerate(tracked(tasks, "trying demonstrations", len(tasks), "tasks")):
        if stop is not None and stop.is_set():
            raise StoppedError("stopped while demonstrations were tried; nothing was started")
        if not task.demonstration:
            continue
        found += 1
        try:
            record(Ticket("preflight", task, "preflight", 0, Purpose.TRAIN, 1.0, 0))
        except RefusedError as error:
            raise DataError(
                f"{tasks.place(row)}, column {data.demonstration}: {error}; correct the value, or set it to null"
            ) from error
    if not found:
        raise DataError(f"data.demonstration={data.demonstration}: all {len(tasks)} tasks have null there")
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()


def _tried_file(lengths_file: Path, actor: ActorConfig, data: DataConfig) -> str:
    """Return the name of the file that exists once all demonstrations were tried. The name depends on the tasks and the
    template (through the name of `lengths_file`), on `data.demonstration` and on the limits."""
    limits = [actor.max_tokens, actor.max_total_tokens, actor.history, data.max_prompt_length, data.truncation]
    made_from = [lengths_file.name, data.demonstration, *limits]
    return f"tried_{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]}"
