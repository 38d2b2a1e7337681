"""Connections, time and memory of one client of the endpoint are bounded."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from asyncrl.agents.chat_api.server import Bounds
from asyncrl.network.http_server import ConnectionBounds
from tests.agents.chat_api.support import LIMITS, TOOL, Agent, episode, user
from tests.helpers import async_until

ANSWER_S = 20.0


async def opened(agent: Agent) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit((await agent.address)[0])
    return await asyncio.open_connection(address.hostname, address.port)


@pytest.mark.parametrize("path", ["/t%2F1/v1/models", "/t%2F1/v1/chat/completions", "/sessions", "/nothing"])
async def test_a_request_without_the_key_is_answered_once_and_its_connection_closed(path: str):
    async with episode(["a"]) as agent:
        await agent.address
        reader, writer = await opened(agent)
        request = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\nContent-Length: 0\r\n\r\n".encode()
        writer.write(request * 2 + b"POST / HTTP/1.1\r\nHost: ")
        async with asyncio.timeout(ANSWER_S):
            assert (await reader.read()).count(b"HTTP/1.1 4") == 1
        writer.close()
        await agent.ask(user("one"))


async def test_strangers_keep_no_agent_from_the_endpoint():
    connections = ConnectionBounds(connections=6)
    async with episode(["a", "b"], bounds=Bounds(connections=connections)) as agent:
        for turn in ("one", "two"):
            strangers = [await opened(agent) for _ in range(20)]
            for _, writer in strangers:
                writer.write(b"POST / HTTP/1.1\r\nHost: ")
            await agent.ask(user(turn))
            async with asyncio.timeout(ANSWER_S):
                assert await strangers[0][0].read() == b""
            for _, writer in strangers:
                writer.close()


async def test_a_connection_with_the_key_is_closed_when_it_was_idle_for_its_time():
    async with episode(["a"], bounds=Bounds(connections=ConnectionBounds(idle_s=0.2))) as agent:
        url, key = await agent.address
        reader, writer = await opened(agent)
        head = f"GET {urlsplit(url).path}/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
        writer.write(head.encode() + b"GET / HT")
        async with asyncio.timeout(ANSWER_S):
            assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        writer.close()
        await agent.ask(user("one"))


@pytest.mark.slow
async def test_a_body_that_does_not_come_is_refused_in_time():
    async with episode(["a"], bounds=Bounds(body_s=0.1)) as agent:
        url, key = await agent.address
        reader, writer = await opened(agent)
        path = f"{urlsplit(url).path}/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 9\r\n\r\n"
        writer.write(head.encode() + b"{")
        async with asyncio.timeout(ANSWER_S):
            assert b"did not come within" in await reader.read()
        writer.close()
        await agent.ask(user("one"))


async def test_more_requests_at_once_than_an_episode_may_have_are_refused_until_others_are_answered():
    go_on = asyncio.Event()

    async def waits(session: str) -> str:
        await go_on.wait()
        return "a"

    async with episode([waits, waits, "b"], bounds=Bounds(at_once=2)) as agent:
        asking = [asyncio.create_task(agent.post(user(text))) for text in ("one", "two")]
        await async_until(lambda: len(agent.engine.requests) == 2)
        status, answer = await agent.post(user("three"))
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        go_on.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200]
        await agent.ask(user("three"))


async def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered():
    async with episode(["a"]) as agent:
        refused = await agent.refusal(user("x" * 10**6), tools=[TOOL])
        assert refused["code"] == "context_length_exceeded"
        assert f"maximum context length is actor.max_tokens={LIMITS.max_tokens}" in refused["message"]
        await agent.ask(user("one"))


@pytest.mark.parametrize("arguments", ["[" * 100 + "]" * 100, '"\\ud800"'])
async def test_arguments_of_calls_are_as_bounded_as_bodies_and_can_be_encoded(arguments: str):
    made = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "echo", "arguments": arguments}}]}
    async with episode(["a"]) as agent:
        status, _ = await agent.post(user("one"), made, user("two"), tools=[TOOL])
        assert status == (400 if arguments.startswith("[") else 200)
        if status == 400:
            await agent.ask(user("one"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_its_answer_is_cut_off_and_the_completion_stays_recorded(stream: bool):
    async with episode(["a", "b"], bounds=Bounds(reading_s=0.2)) as agent:
        url, key = await agent.address
        # The answer repeats the metadata, which is more than the buffers of both sides hold.
        body = json.dumps({"input": "one", "metadata": {"x": "y" * 12_000_000}, "stream": stream}).encode()
        _, writer = await opened(agent)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        head = f"POST {urlsplit(url).path}/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await async_until(lambda: agent.counts.answered == 1, ANSWER_S)
        await async_until(lambda: agent.player._server._http.connections == 0, ANSWER_S)
        writer.close()
        await agent.ask(user("one"), {"role": "assistant", "content": "a"}, user("two"))
    assert len(agent.trajectory.branches) == 1
