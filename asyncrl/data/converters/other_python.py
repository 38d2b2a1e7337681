"""Reads tasks that a program in another Python makes. An environment needs another Python if its packages conflict with
asyncrl's."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task
from asyncrl.version import PACKAGE

PROGRAMS = PACKAGE / "agents" / "programs"
"""The folder of programs that run in other Pythons. It is found by its path, because this package must not import
`agents`."""
REASON_LINES = 3


def check_arguments(arguments: str) -> None:
    """Raises DataError: the value of --args is not a JSON object."""
    try:
        if not isinstance(json.loads(arguments), dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise DataError(f"--args {arguments!r} must be a JSON object: {error}") from error


def tasks_of(python: str, program: Path, name: str, options: Sequence[str]) -> Iterator[Task]:
    """The tasks of the environment `name`, which `program` writes as JSON lines. Raises DataError."""
    command = [python, str(program), "tasks", name, *options]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True
            )
        except OSError as error:
            raise DataError(f"--python {python} cannot be started: {error}") from error
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    row = json.loads(line)
                    if "error" in row:
                        raise DataError(row["error"])
                    yield _task(row)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{python} wrote a line that is not a task: {error!r}") from error
        if process.returncode:
            said.seek(0)
            reason = " | ".join(said.read().strip().splitlines()[-REASON_LINES:])
            raise DataError(f"{name}: {reason or f'{python} ended with status {process.returncode}'}")


def _task(row: dict[str, Any]) -> Task:
    source, extra = row["data_source"], row["extra_info"]
    return Task(
        id=task_id(source, extra["split"], extra["index"]),
        messages=row["prompt"],
        ground_truth=row["reward_model"]["ground_truth"],
        data_source=source,
        extra_info=extra,
    )
