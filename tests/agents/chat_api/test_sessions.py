"""Agents elsewhere request episodes over HTTP, play them, and report the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
from yarl import URL

from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.agents.chat_api.result import AgentError
from asyncrl.agents.chat_api.sessions import Sessions
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.types import Trajectory
from tests.agents.chat_api.support import CHAT, LIMITS, TOKENIZER, user
from tests.episode.fakes import END, ScriptedEngine, make_ticket
from tests.helpers import async_until

KEY = "the key with which agents ask"


class Elsewhere:
    """An actor whose episodes wait for agents, and the HTTP client of one."""

    def __init__(self, player: AgentPlayer, http: aiohttp.ClientSession, sessions: Sessions) -> None:
        self.player, self.http, self.sessions = player, http, sessions

    def begin(self, name: str, begin: Callable[[], None] = lambda: None) -> asyncio.Task[Trajectory]:
        engine = ScriptedEngine(TOKENIZER, ["hello"] * 3, end=END)
        runner = EpisodeRunner(engine, CHAT, self.player, LIMITS)
        return asyncio.create_task(runner.run(make_ticket(name), begin))

    async def post(self, url: str, key: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(url, json=body or {}, headers=headers) as answer:
            return answer.status, await answer.json() if answer.content_type == "application/json" else None

    async def take(self, wait_s: float = 30.0) -> Any:
        return (await self.post(f"{self.player.url}/sessions", KEY, {"wait_s": wait_s}))[1]

    async def tell(self, session: Any, what: str, body: Any, key: str | None = None) -> int:
        url = f"{self.player.url}/sessions/{session['id']}/{what}"
        return (await self.post(url, key or session["api_key"], body))[0]

    async def chat(self, session: Any) -> int:
        body = {"messages": [user("hi")]}
        return (await self.post(f"{session['base_url']}/chat/completions", session["api_key"], body))[0]


@asynccontextmanager
async def elsewhere(timeout_s: float = 60.0) -> AsyncIterator[Elsewhere]:
    sessions = Sessions(KEY, timeout_s)
    player = AgentPlayer(sessions, "127.0.0.1", 0, None, sessions.counters, sessions)
    await player.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Elsewhere(player, http, sessions)
    finally:
        await player.close()


async def test_an_episode_begins_once_an_agent_has_taken_it():
    async with elsewhere() as actor:
        begun = list[str]()
        running = [actor.begin(name, partial(begun.append, name)) for name in ("t/1", "t/2")]
        await async_until(lambda: actor.sessions.counters()["agent_sessions_waiting"] == 2)
        assert begun == []
        await actor.take()
        assert begun == ["t/1"]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_an_episode_that_no_agent_takes_fails_after_the_longest_wait():
    sessions = Sessions(KEY, 60.0, longest_wait_s=0.05)
    with pytest.raises(AgentError, match=r"no agent requested it for actor\.episode_timeout_s=0\.05"):
        await sessions(make_ticket("t/1").task, "http://actor/t/1/v1", "its key")
    assert sessions.counters()["agent_sessions_waiting"] == 0


async def test_an_agent_asks_for_an_episode_plays_it_and_gives_rewards():
    async with elsewhere() as actor:
        running = actor.begin("t/1")
        session = await actor.take()
        assert session["task"]["messages"] == [dict(each) for each in make_ticket("t/1").task.messages]
        assert await actor.chat(session) == 200
        assert await actor.tell(session, "reward", {"rewards": {"polite": 1}, "turns": [0.5]}) == 204
        assert await actor.tell(session, "end", {}) == 204
        trajectory = await running
        assert trajectory.rewards == {"polite": 1.0}
        assert trajectory.turn_scores == [0.5]
        assert await actor.tell(session, "reward", {}) == 401, "it is over"
        assert await actor.take(0.0) is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "body", ['{"rewards": {"r": 1e39}}', '{"rewards": {"r": %s}}', '{"turns": [%s]}', '{"metrics": {"m": %s}}']
)
async def test_what_is_no_finite_number_is_refused_with_the_reason_and_counted(number: str, body: str):
    async with elsewhere() as actor:
        running = actor.begin("t/1")
        session = await actor.take()
        assert await actor.chat(session) == 200
        assert await actor.tell(session, "reward", {"rewards": {"r": 0.5}}) == 204
        url, headers = f"{actor.player.url}/sessions/{session['id']}/reward", {"x-api-key": session["api_key"]}
        async with actor.http.post(url, data=body.replace("%s", number), headers=headers) as answer:
            assert answer.status == 400
            assert "finite number" in (await answer.json())["error"]["message"]
        assert actor.player.counters()["agent_sessions_refused"] == 1
        assert await actor.tell(session, "end", {}) == 204
        assert (await running).rewards == {"r": 0.5}, "those of before still count"


async def test_keys_are_of_their_own_sessions():
    async with elsewhere() as actor:
        running = [actor.begin(f"t/{number}") for number in range(2)]
        assert (await actor.post(f"{actor.player.url}/sessions", "another"))[0] == 401
        one, other = await actor.take(), await actor.take()
        assert one["id"] != other["id"]
        assert await actor.tell(one, "end", {}, other["api_key"]) == 401
        assert await actor.tell(one, "end", {}, KEY) == 401
        assert (await actor.post(f"{actor.player.url}/sessions", one["api_key"]))[0] == 401
        for session in (one, other):
            assert await actor.chat(session) == 200
            assert await actor.tell(session, "end", {}) == 204
        await asyncio.gather(*running)


@pytest.mark.slow
async def test_a_session_fails_when_its_agent_says_so_or_is_heard_no_more():
    async with elsewhere(timeout_s=2.0) as actor:
        running = actor.begin("t/1")
        assert await actor.tell(await actor.take(), "end", {"error": "no browser"}) == 204
        with pytest.raises(AgentError, match="no browser"):
            await running
        running = actor.begin("t/2")
        await actor.take()
        with pytest.raises(AgentError, match="agent sent no request"):
            await running
        counters = actor.player.counters()
        assert (counters["agent_sessions_failed"], counters["agent_sessions_silent"]) == (1, 1)


async def slow(actor: Elsewhere, session: Any, what: str, body: bytes) -> tuple[Any, Any]:
    """Begin a request, whose body is to be written yet."""
    url = URL(actor.player.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /sessions/{session['id']}/{what} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {session['api_key']}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    return reader, writer


@pytest.mark.parametrize(("what", "body"), [("reward", b'{"rewards": {"late": 1}}'), ("end", b'{"error": "late"}')])
async def test_what_comes_when_a_session_is_over_has_no_effect_and_its_agent_learns_so(what: str, body: bytes):
    async with elsewhere() as actor:
        running = actor.begin("t/1")
        session = await actor.take()
        assert await actor.chat(session) == 200
        reader, writer = await slow(actor, session, what, body)
        await async_until(lambda: actor.sessions.find("t/1", session["api_key"]).in_flight)
        assert await actor.tell(session, "end", {}) == 204
        assert (await running).rewards == {}
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        assert actor.sessions.counts.failed == 0


@pytest.mark.parametrize("error", ["", 0, [], {}])
async def test_an_error_without_a_message_fails_its_episode(error: Any):
    async with elsewhere() as actor:
        running = actor.begin("t/1")
        session = await actor.take()
        assert await actor.chat(session) == 200
        assert await actor.tell(session, "end", {"error": error}) == 204
        with pytest.raises(AgentError, match="the agent reports: "):
            await running


@pytest.mark.slow
async def test_sessions_that_are_over_before_an_agent_asks_are_not_kept():
    async with elsewhere() as actor:
        stays = actor.begin("stays")
        for number in range(300):
            running = actor.begin(f"t/{number}")
            await async_until(lambda: len(actor.sessions._sessions) == 2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert actor.sessions._waiting.qsize() < 100
        assert (await actor.take())["id"] == "stays"
        stays.cancel()


async def test_what_agents_send_about_sessions_is_bounded():
    async with elsewhere() as actor:
        running = actor.begin("t/1")
        session = await actor.take()
        assert await actor.tell(session, "reward", {"rewards": {"x" * (1 << 20): 1}}) == 400
        assert (await actor.post(f"{actor.player.url}/sessions", KEY, {"wait_s": -(10**400)}))[0] == 400
        running.cancel()


async def test_an_agent_behind_a_proxy_with_tls_gets_an_address_with_tls():
    async with elsewhere() as actor:
        running = actor.begin("t/1")
        headers = {"X-Api-Key": KEY, "X-Forwarded-Proto": "https", "Host": "rl.example"}
        async with actor.http.post(f"{actor.player.url}/sessions", json={"wait_s": 10**400}, headers=headers) as answer:
            assert (await answer.json())["base_url"] == "https://rl.example/t%2F1/v1"
        running.cancel()
