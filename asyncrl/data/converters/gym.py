"""Makes tasks of text games with `reset` and `step`, such as those of textarena and gem. A task is a seed.

The tasks are made in a Python where the game is installed, by the program that also plays the episodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.data.converters.other_python import PROGRAMS, check_arguments, tasks_of
from asyncrl.types import Task

PROGRAM = PROGRAMS / "gym_agent"
FIELD = "gym"
"""The field of `extra_info` that has the game, its arguments and its seed."""
LIMIT = 1000


def tasks(
    name: str, python: str = "python", arguments: str = "{}", limit: int | None = None, first: int = 0
) -> Iterator[Task]:
    """`limit` tasks of the game `name` with its `arguments` in JSON. The first seed is `first`. Raises DataError."""
    check_arguments(arguments)
    options = ["--args", arguments, "--first", str(first), "--limit", str(LIMIT if limit is None else limit)]
    return tasks_of(python, PROGRAM, name, options)
