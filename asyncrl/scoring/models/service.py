"""A scorer behind HTTP: JSON posted with bounded retries and within a time limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from asyncrl.errors import ScoringError, UnavailableError

_FIRST_PAUSE_S = 0.1
_CHUNK = 1 << 16
_MAX_BYTES = 1 << 28
_REFUSED = (400, 413, 422)
"""Statuses that blame what was sent. All others blame the server, or the way to it."""


class Service:
    """Posts JSON under a base URL.

    A connection that fails or breaks off, a status of 429 and one from 500 on are tried again, at most `retries` times
    and after a growing pause. `timeout_s` bounds it all, however slowly the answer drips in.
    """

    def __init__(
        self, url: str, timeout_s: float, retries: int, pause: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        self._pause = pause

    def post(self, path: str, body: Any) -> Any:
        """The JSON that answers.

        Raises ScoringError: what was sent is refused, or the answer is no JSON. Raises UnavailableError: there is no
        whole answer in time.
        """
        return asyncio.run(self._post(self.url + path, json.dumps(body).encode()))

    async def _post(self, url: str, data: bytes) -> Any:
        failure = ""
        try:
            async with asyncio.timeout(self._timeout_s), aiohttp.ClientSession(trust_env=True) as session:
                for attempt in range(self._retries + 1):
                    if attempt:
                        await self._pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                    try:
                        status, answer = await _ask(session, url, data)
                    except (aiohttp.ClientError, OSError) as error:
                        failure = f"{type(error).__name__}: {error}"
                        continue
                    if status == 200:
                        return _decoded(url, answer)
                    failure = f"status {status}: {answer[:300].decode(errors='replace')}"
                    if status in _REFUSED:
                        raise ScoringError(f"{url} gave no scores ({failure})")
                    if status != 429 and status < 500:
                        break
        except TimeoutError:
            failure = f"no whole answer within {self._timeout_s:g} s{failure and ', before that '}{failure}"
        raise UnavailableError(f"{url} gave no scores ({failure})")


async def _ask(session: aiohttp.ClientSession, url: str, data: bytes) -> tuple[int, bytes]:
    unbounded, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    answer = bytearray()
    async with session.post(url, data=data, headers=headers, timeout=unbounded, allow_redirects=False) as response:
        async for chunk in response.content.iter_chunked(_CHUNK):
            answer += chunk
            if len(answer) > _MAX_BYTES:
                raise ScoringError(f"{url} gave no scores (the answer is longer than {_MAX_BYTES} bytes)")
    return response.status, bytes(answer)


def _decoded(url: str, answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError as error:
        raise ScoringError(f"{url} gave no scores (the answer is not JSON: {error})") from error
