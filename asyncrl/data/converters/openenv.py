"""Makes tasks of an OpenEnv server: the tasks in its list. If the server has no list, each task is a seed of its
environment.

    GET /metadata, /list_environments             the environment
    POST /NAME/num_tasks {"split": "train"}       the number of tasks; 404, 501: there is no list, and a task is a seed

A task contains the arguments that its episodes send with `reset`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task

FIELD = "openenv"
"""The field of `extra_info` with the arguments of `reset`."""

LIMIT = 1000
TIMEOUT_S = 60.0
MAX_BYTES = 1 << 24
LISTS_NONE = (404, 501)
"""Statuses of a server whose environment has no list of tasks."""


def tasks(url: str, split: str, limit: int | None = None, first: int = 0, prompt: str | None = None) -> Iterator[Task]:
    """`limit` tasks, of which the first one has the index or seed `first`. The first user message to the policy is
    `prompt`, by default the description of the environment. Raises DataError.
    """
    server = _Server(url)
    about = server.asked("GET", "metadata")
    names = server.asked("GET", "list_environments")
    if not isinstance(about, dict) or not isinstance(names, list) or not names:
        raise DataError(f"{url} is not an OpenEnv server: it answered {about!r:.100} and {names!r:.100}")
    name = str(names[0])
    counted = server.asked("POST", f"{quote(name, safe='')}/num_tasks", {"split": split}, LISTS_NONE)
    match counted:
        case None:
            count = None
        case {"num_tasks": int(count)}:
            pass
        case _:
            raise DataError(f"{url} answered num_tasks with {counted!r:.100}, not a number of tasks")
    wanted = limit if limit is not None else LIMIT if count is None else count
    end = first + wanted if count is None else min(count, first + wanted)
    text = prompt if prompt is not None else str(about.get("description") or name)
    for index in range(first, end):
        reset: Mapping[str, Any] = {"seed": index} if count is None else {"split": split, "index": index}
        extra_info = {"index": index, "split": split, FIELD: json.dumps(reset)}
        messages = [{"role": "user", "content": text}]
        yield Task(task_id(f"openenv/{name}", split, index), messages, "", f"openenv/{name}", extra_info=extra_info)


class _Server:
    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise DataError(f"--source {url}: give the address of the server, such as http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def asked(self, method: str, path: str, body: Any = None, without: tuple[int, ...] = ()) -> Any:
        """The answer of the server; None if its status is one of `without`. Raises DataError: the request failed."""
        data = None if body is None else json.dumps(body).encode()
        url, headers = f"{self._url}/{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                return json.loads(response.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            if error.code in without:
                return None
            raise DataError(f"{url} answered with status {error.code}: {error.read(500)!r}") from error
        except (OSError, ValueError) as error:
            reason = f"{url} cannot be reached: {error}; is an OpenEnv server running there?"
            raise DataError(reason) from error
