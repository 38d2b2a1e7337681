"""The engine of `asyncrl try` that samples from a running server, and the reader of scripts for the scripted engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Generation, PlacedImage
from asyncrl.engine.fleet.server import InferenceServer, Segment
from asyncrl.engine.scripted import VERSION, Answer, EngineWithoutUpdates
from asyncrl.errors import DataError
from asyncrl.types import Sampling

FORM = '"TEXT" or {"content": "TEXT", "tool_calls": [{"name": "NAME", "arguments": {...}}]}'


class ServerEngine(EngineWithoutUpdates):
    """Samples from one running server, without changing the server."""

    def __init__(self, server: InferenceServer) -> None:
        super().__init__()
        self._server = server

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        parts: list[Segment] = []
        sampled = np.zeros(0, np.int32)
        while True:
            left = Sampling(sampling.temperature, sampling.max_new_tokens - len(sampled), sampling.grammar)
            so_far = np.concatenate([tokens, sampled])
            parts.append(await self._server.generate(uuid.uuid4().hex, so_far, left, stop, None, images=images))
            sampled = np.concatenate([part.tokens for part in parts])
            if parts[-1].finish != "cut" or not len(parts[-1].tokens):
                break
        logprobs = np.concatenate([part.logprobs for part in parts])
        finish = "stop" if parts[-1].finish == "stop" else "length"
        return Generation(sampled, logprobs, np.full(len(sampled), VERSION, np.int32), finish)

    async def close(self) -> None:
        await self._server.close()


def read_answers(path: Path) -> list[Answer]:
    """The answers of a script, one per line. Raises DataError, which names the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--answers={path} cannot be read: {error}") from error
    return [_answer(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _answer(place: str, line: str) -> Answer:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}; write {FORM}") from error
    match found:
        case str():
            return found
        case {"tool_calls": [*calls], **rest} if rest.keys() <= {"content"} and all(map(_is_call, calls)):
            return {"content": str(rest.get("content") or ""), "tool_calls": calls}
        case {"content": str(content), **rest} if not rest:
            return content
    raise DataError(f"{place} is not an answer; write {FORM}")


def _is_call(call: Any) -> bool:
    match call:
        case {"name": str(), "arguments": dict(), **rest}:
            return not rest
    return False
