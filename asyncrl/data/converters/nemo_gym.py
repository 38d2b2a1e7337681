"""Makes tasks from files of NeMo Gym. A line has a request of OpenAI's Responses API and data for the resources server.

A task keeps its whole line, and an episode sends this line to the server. The task's messages are the texts of the
request. They are only for people who look at the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task

FIELD = "nemo_gym"
"""The field of `extra_info` with the whole line."""


def tasks(source: Path, split: str) -> Iterator[Task | None]:
    """The tasks of a file with JSON lines; None for a line without a prompt. Raises DataError."""
    try:
        # splitlines would also divide lines at U+2028 and U+0085, which texts of JSON may contain.
        lines = source.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    given = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for index, (number, line) in enumerate(given):
        try:
            row = json.loads(line)
            params = row["responses_create_params"]
            messages = _messages(params)
            name = str((row.get("agent_ref") or {}).get("name") or source.stem)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{source}: line {number} has no responses_create_params with messages ({error!r:.200}); give a "
                "file of NeMo Gym"
            ) from error
        data_source = f"nemo-gym/{name}"
        extra_info = {"index": index, "split": split, FIELD: line}
        yield (
            Task(task_id(data_source, split, index), messages, "", data_source, extra_info=extra_info)
            if messages
            else None
        )


def _messages(params: Mapping[str, Any]) -> list[dict[str, str]]:
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    found = [
        {"role": _role(item["role"]), "content": _text(item["content"])}
        for item in items
        if item.get("type", "message") == "message"
    ]
    if found and params.get("instructions"):
        found.insert(0, {"role": "system", "content": params["instructions"]})
    return found


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if "text" in part else f"({part['type']})" for part in content)
