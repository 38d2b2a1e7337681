"""Tries a user's code in the process of the test, without the seconds that a child process takes to start."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from asyncrl.errors import ScoringError
from asyncrl.launch.preflight.trying import load
from asyncrl.wire import Message


class InThisProcess:
    """Answers like the process of a trial."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._answer = load(settings)

    def submit(self, messages: Sequence[Message], read: Callable[[Message], Message]) -> Future[Message]:
        future: Future[Message] = Future()
        reply = self._answer(messages, math.inf)
        if reply.kind == "failed":
            future.set_exception(ScoringError(str(reply.body["reason"])))
        else:
            future.set_result(read(reply))
        return future

    def close(self) -> None:
        pass
