"""Reads the files of a run's tasks before the checks that load torch, so that a wrong column is told at once.

Sources that generate their tasks are not read. They are only compared, because held-out tasks must not be training
tasks.
"""

from __future__ import annotations

from asyncrl.config.refusals import ELSEWHERE, missing_data
from asyncrl.data.converters.reasoning_gym import check_held_out
from asyncrl.data.opening import RunTasks
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError


def read_files(tasks: RunTasks) -> dict[str, TaskFile]:
    """Map `data.train` and `data.eval` to their tasks, if all roles read these tasks from files of this machine. If
    both are the same tasks, only `data.train` is in the result.

    Missing files are left to other checks. Raises DataError, with a line for each key: its files cannot be used, or its
    held-out sources generate training tasks.
    """
    data, read, problems = tasks.data, dict[str, TaskFile](), list[str]()
    missing = missing_data(data, None)
    for key, sources in {"data.train": data.train, "data.eval": data.eval}.items():
        held_out = key == "data.eval"
        if not sources or key in missing or (held_out and data.evaluates_training_tasks):
            continue
        if tasks.made_file(sources) is None and not any(each.startswith(ELSEWHERE) for each in sources):
            try:
                read[key] = tasks.all(sources, held_out)
            except DataError as error:
                problems.append(str(error))
    try:
        check_held_out(data.train, data.eval or ())
    except DataError as error:
        problems.append(str(error))
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return read
