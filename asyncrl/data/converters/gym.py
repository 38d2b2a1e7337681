"""Tasks of text games of textarena, gem and others with `reset` and `step`: each is a seed. A Python that has the game
writes them, by the program that plays them."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.data.converters.other_python import PROGRAMS, check_arguments, tasks_of
from asyncrl.types import Task

PROGRAM = PROGRAMS / "gym_agent"
FIELD = "gym"
"""The field of `extra_info` with the game, its arguments and its seed."""
LIMIT = 1000


def tasks(
    name: str, python: str = "python", arguments: str = "{}", limit: int | None = None, first: int = 0
) -> Iterator[Task]:
    """`limit` tasks of the game `name`, made with `arguments` in JSON, with the seeds from `first` on. Raises
    DataError."""
    check_arguments(arguments)
    options = ["--args", arguments, "--first", str(first), "--limit", str(LIMIT if limit is None else limit)]
    return tasks_of(python, PROGRAM, name, options)
