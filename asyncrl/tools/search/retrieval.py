"""Requests passages from a retrieval server in the format of Search-R1, for many episodes at once.

    POST URL {"queries": [...], "topk": 3, "return_scores": true}
    200 {"result": [[{"document": {"contents": "TITLE\\nTEXT"}, "score": 0.5}, ...], ...]}, one list for each query

While all connections are in use, queries wait, and those that wait are sent together. So a slow server gets few large
requests, and a fast one many small ones. If a server refuses several queries together, each of them is sent again
separately, so that one invalid query does not fail the others.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from asyncrl.errors import RefusedError, UnavailableError
from asyncrl.tools.search.passages import TitledPassage, passage_of

CONNECTIONS = 4
QUERIES_AT_ONCE = 64
OVERLOADED = (429, 503)
"""The HTTP statuses of an overloaded server. Queries refused with one of these are not sent again one by one, because
this would add to the server's load."""

MAX_BYTES = 64 << 20
"""The maximum number of bytes in one answer."""


@dataclass(slots=True)
class _Query:
    text: str
    topk: int
    answer: asyncio.Future[list[TitledPassage]]


class RetrievalServer:
    """Requests passages from the server at `url`, which must answer within `timeout_s` seconds."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._waiting: deque[_Query] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        # Those senders that still look for queries. A sender that closes its connection no longer does.
        self._looking: set[asyncio.Task[None]] = set()

    def prepare(self) -> None:
        """Do nothing: the server may start later than the actor."""

    async def find(self, query: str, topk: int) -> Sequence[TitledPassage]:
        """Find passages, see `PassageSource`.

        Raises UnavailableError: the server cannot be reached, or its answer is invalid; RefusedError: the server
        refused the query.
        """
        answer: asyncio.Future[list[TitledPassage]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Query(query, topk, answer))
        if len(self._looking) < CONNECTIONS:
            sender = asyncio.create_task(self._send_all(), name="retrieval")
            for group in (self._senders, self._looking):
                group.add(sender)
                sender.add_done_callback(group.discard)
        return await answer

    async def _send_all(self) -> None:
        """Send the waiting queries over one connection, and close it when no query is left."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            try:
                while queries := self._next():
                    await self._answer(session, queries)
            finally:
                if (sender := asyncio.current_task()) is not None:
                    self._looking.discard(sender)

    def _next(self) -> list[_Query]:
        """Take waiting queries with the same `topk`, and drop queries whose caller was cancelled."""
        queries: list[_Query] = []
        while self._waiting and len(queries) < QUERIES_AT_ONCE:
            if not self._waiting[0].answer.done():
                if queries and self._waiting[0].topk != queries[0].topk:
                    break
                queries.append(self._waiting[0])
            self._waiting.popleft()
        return queries

    async def _answer(self, session: aiohttp.ClientSession, queries: Sequence[_Query]) -> None:
        try:
            found = await self._request(session, [query.text for query in queries], queries[0].topk)
        except RefusedError as error:
            if len(queries) == 1:
                _fail(queries, error)
                return
            for query in queries:
                if not query.answer.done():
                    await self._answer(session, [query])
        except Exception as error:  # noqa: BLE001 - `find` raises it
            _fail(queries, error)
        else:
            for query, passages in zip(queries, found, strict=True):
                if not query.answer.done():
                    query.answer.set_result(passages)

    async def _request(
        self, session: aiohttp.ClientSession, queries: list[str], topk: int
    ) -> list[list[TitledPassage]]:
        """Send one request. Raises UnavailableError: the server is overloaded, cannot be reached, or gave an invalid
        answer; RefusedError: it answered with any other status of 400 or above."""
        body = {"queries": queries, "topk": topk, "return_scores": True}
        try:
            async with session.post(self._url, json=body, allow_redirects=False) as response:
                content = await _bounded(response)
                if response.status in OVERLOADED:
                    raise UnavailableError(f"{self._url} answered with status {response.status}")
                if response.status >= 400:
                    raise RefusedError(f"{self._url} answered with status {response.status}: {content[:200]!r}")
                return read_result(json.loads(content), len(queries), topk)
        except TimeoutError as error:
            raise UnavailableError(f"{self._url} took more than {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{self._url} cannot be reached: {error!r:.200}") from error
        except (ValueError, RecursionError) as error:
            raise UnavailableError(f"{self._url} answered with status {response.status}, {error!r:.200}") from error


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            raise UnavailableError(f"{response.url} answered with more than {MAX_BYTES} bytes")
    return b"".join(parts)


def read_result(answer: Any, queries: int, topk: int) -> list[list[TitledPassage]]:
    """Read the passages for each query from an answer, which may also have scores. Raises ValueError: the answer is
    malformed."""
    result = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(result, list) or len(result) != queries:
        raise ValueError(f"it has no `result` with a list for each of {queries} queries")
    return [[_passage(document) for document in documents[:topk]] for documents in map(_listed, result)]


def _listed(documents: Any) -> list[Any]:
    if not isinstance(documents, list):
        raise ValueError(f"the result of a query is not a list: {documents!r:.100}")
    return documents


def _passage(found: Any) -> TitledPassage:
    match found.get("document", found) if isinstance(found, Mapping) else None:
        case {"contents": str(contents)}:
            return passage_of(contents)
        case {"text": str(text), **rest}:
            return TitledPassage(str(rest.get("title") or ""), text)
    raise ValueError(f"a document has neither contents nor text: {found!r:.100}")


def _fail(queries: Sequence[_Query], error: Exception) -> None:
    for query in queries:
        if not query.answer.done():
            query.answer.set_exception(error)
