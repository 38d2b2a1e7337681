"""Retrieval servers in the format of Search-R1, as real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from aiohttp import web

from asyncrl.errors import RefusedError, UnavailableError
from asyncrl.tools.search import retrieval
from asyncrl.tools.search.passages import TitledPassage
from asyncrl.tools.search.retrieval import CONNECTIONS, QUERIES_AT_ONCE, RetrievalServer, read_result
from tests.helpers import GENEROUS_S
from tests.network.web import Handler, web_server

T = TypeVar("T")


def result_of(queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
    return [
        [
            {"document": {"id": "1", "contents": f"{query} {rank}\nText of {query}."}, "score": 1.0}
            for rank in range(topk)
        ]
        for query in queries
    ]


class Server:
    """Answers like a server of Search-R1, notes the requests, and waits for `open` before it answers."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.now = self.most = 0
        self.open = asyncio.Event()
        self.open.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (request.method, request.path) == ("POST", "/retrieve")
        self.requests.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        await self.open.wait()
        self.now -= 1
        if "poison" in body["queries"]:
            return web.Response(status=500, text="no such word")
        return web.json_response({"result": result_of(body["queries"], body["topk"])})


def asked(handler: Handler, act: Callable[[RetrievalServer], Awaitable[T]], timeout_s: float = 20.0) -> T:
    async def main() -> T:
        async with web_server(handler) as port:
            return await act(RetrievalServer(f"http://127.0.0.1:{port}/retrieve", timeout_s))

    return asyncio.run(main())


def test_a_query_gets_the_passages_of_the_server():
    server = Server()
    found = asked(server.answer, lambda client: client.find("bees", 2))
    assert found == [TitledPassage("bees 0", "Text of bees."), TitledPassage("bees 1", "Text of bees.")]
    assert server.requests == [{"queries": ["bees"], "topk": 2, "return_scores": True}]


@pytest.mark.slow
def test_queries_of_many_episodes_are_sent_together_over_few_connections():
    server = Server()
    server.open.clear()
    queries = [f"q{number}" for number in range(500)]

    async def act(client: RetrievalServer) -> list[Any]:
        asking = [asyncio.create_task(client.find(query, 1 + number % 2)) for number, query in enumerate(queries)]
        while server.now < CONNECTIONS:
            await asyncio.sleep(0.001)
        server.open.set()
        return await asyncio.gather(*asking)

    found = asked(server.answer, act)
    assert [passages[0].title for passages in found] == [f"{query} 0" for query in queries]
    assert [len(passages) for passages in found] == [1, 2] * 250
    assert server.most == CONNECTIONS
    assert all(len(request["queries"]) <= QUERIES_AT_ONCE for request in server.requests)
    assert sum(len(request["queries"]) for request in server.requests) == 500


def test_queries_that_wait_for_the_server_go_in_one_request():
    server = Server()
    server.open.clear()

    async def act(client: RetrievalServer) -> None:
        first = []
        for number in range(CONNECTIONS):
            first.append(asyncio.create_task(client.find(f"first{number}", 1)))
            while server.now <= number:
                await asyncio.sleep(0.001)
        rest = [asyncio.create_task(client.find(f"rest{number}", 1)) for number in range(50)]
        await asyncio.sleep(0)
        server.open.set()
        await asyncio.gather(*first, *rest)

    asked(server.answer, act)
    assert [len(request["queries"]) for request in server.requests] == [1] * CONNECTIONS + [50]


def test_a_query_that_the_server_refuses_fails_alone():
    server = Server()

    async def act(client: RetrievalServer) -> list[Any]:
        return await asyncio.gather(*(client.find(each, 1) for each in ("a", "poison", "b")), return_exceptions=True)

    first, refused, last = asked(server.answer, act)
    assert (first[0].title, last[0].title) == ("a 0", "b 0")
    assert isinstance(refused, RefusedError)
    assert "status 500: b'no such word'" in str(refused)
    assert [len(request["queries"]) for request in server.requests] == [3, 1, 1, 1]


def test_queries_that_come_while_all_connections_close_are_answered():
    server = Server()
    server.open.clear()

    async def twice(client: RetrievalServer, number: int) -> None:
        for each in range(3):
            await client.find(f"q{number} {each}", 1 + number)

    async def act(client: RetrievalServer) -> None:
        asking = [asyncio.create_task(twice(client, number)) for number in range(CONNECTIONS)]
        while server.now < CONNECTIONS:
            await asyncio.sleep(0.001)
        server.open.set()
        await asyncio.wait_for(asyncio.gather(*asking), GENEROUS_S)

    asked(server.answer, act)


def test_a_query_that_nobody_waits_for_is_not_sent():
    server = Server()
    server.open.clear()

    async def act(client: RetrievalServer) -> None:
        sent = [asyncio.create_task(client.find(f"sent{number}", 1)) for number in range(CONNECTIONS)]
        while server.now < 1:
            await asyncio.sleep(0.001)
        asking = [asyncio.create_task(client.find(f"left{number}", 1)) for number in range(3)]
        await asyncio.sleep(0)
        for each in (*asking, sent[0]):
            each.cancel()
        server.open.set()
        await asyncio.gather(*sent[1:])
        assert (await client.find("next", 1))[0].title == "next 0"

    asked(server.answer, act)
    assert not [query for request in server.requests for query in request["queries"] if query.startswith("left")]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "no json"),
        (200, "[]"),
        (200, '{"result": []}'),
        (200, '{"result": [{}]}'),
        (200, '{"result": [["text"]]}'),
        (200, '{"result": [[{"document": {"contents": 5}}]]}'),
        (200, "[" * 100_000),
        (200, '{"result": [["\\ud800"]]}'),
        (302, ""),
        (503, "later"),
        (429, "later"),
    ],
)
def test_other_answers_are_failures_of_the_server(status: int, text: str):
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers={"Location": "/x"} if status == 302 else {})

    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1"):
        asked(answer, lambda client: client.find("a", 1))


@pytest.mark.slow
def test_a_server_that_is_silent_endless_or_away_is_a_failure_and_the_next_query_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(retrieval, "MAX_BYTES", 1 << 20)
    server = Server()

    async def hostile(request: web.Request) -> web.StreamResponse:
        (query,) = json.loads(await request.text())["queries"]
        if query == "silent":
            await asyncio.sleep(60)
        if query == "cut":
            assert request.transport is not None
            request.transport.close()
        if query == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(1 << 16))
        return await server.answer(request)

    async def act(client: RetrievalServer) -> None:
        for query, reason in (("silent", "more than 2 s"), ("endless", "bytes"), ("cut", "cannot be reached")):
            with pytest.raises(UnavailableError, match=reason):
                await client.find(query, 1)
        assert (await client.find("fine", 1))[0].title == "fine 0"

    asked(hostile, act, timeout_s=2.0)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        asyncio.run(RetrievalServer("http://127.0.0.1:1/retrieve", 5.0).find("a", 1))


def test_documents_may_come_without_scores_or_with_title_and_text():
    answer = {"result": [[{"id": "1", "contents": '"T"\nx'}, {"document": {"title": "U", "text": "y"}}, {"text": "z"}]]}
    assert read_result(answer, 1, 5) == [[TitledPassage('"T"', "x"), TitledPassage("U", "y"), TitledPassage("", "z")]]
    assert read_result(answer, 1, 1) == [[TitledPassage('"T"', "x")]]
