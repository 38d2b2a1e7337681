"""Makes tasks of verifiers environments.

The program that plays the episodes also makes the tasks, in a Python where the environment is installed.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.data.converters.other_python import PROGRAMS, check_arguments, tasks_of
from asyncrl.types import Task

PROGRAM = PROGRAMS / "verifiers_agent"


def tasks(
    name: str, split: str, python: str = "python", arguments: str = "{}", limit: int | None = None
) -> Iterator[Task]:
    """The first `limit` tasks (None: all) of the environment `name`, with its `arguments` in JSON. Raises DataError."""
    check_arguments(arguments)
    options = ["--args", arguments, "--split", split]
    if limit is not None:
        options += ["--limit", str(limit)]
    return tasks_of(python, PROGRAM, name, options)
