"""Tasks of environments of verifiers. A Python that has the environment writes them, by the program that plays them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl import adapters
from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task

PROGRAM = Path(adapters.__file__).parent / "verifiers_agent"
REASON_LINES = 3


def tasks(
    name: str, split: str, python: str = "python", arguments: str = "{}", limit: int | None = None
) -> Iterator[Task]:
    """The first `limit` tasks of the environment `name`, with `arguments` in JSON. Raises DataError."""
    try:
        if not isinstance(json.loads(arguments), dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise DataError(f"--args {arguments!r} must be a JSON object: {error}") from error
    command = [python, str(PROGRAM), "tasks", name, "--args", arguments, "--split", split]
    if limit is not None:
        command += ["--limit", str(limit)]
    with tempfile.TemporaryFile("w+") as said:
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
                raise DataError(f"{python} wrote a line that is no task: {error!r}") from error
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
