"""Hostile requests at the endpoint of agents, over real sockets, while an honest agent goes on with its episode.

What must hold: every request is answered or its connection is closed, none by a fault of the endpoint; the process
stays up with its memory bounded; the attacked episode ends as a trajectory; the honest one has one branch.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from tests.security.mutator import DEEP, HOSTILE

ANSWER_S = 60.0
AT_ONCE = 16
MAX_GROWTH_MB = 192.0
"""Bodies are read into memory before they are refused."""
LARGE = 50 << 20
HONEST_TURNS = 20
TURN = {"role": "assistant", "content": "yes"}
FUNCTION = {
    "name": "echo",
    "description": "d",
    "parameters": {"type": "object", "properties": {"t": {"type": "string"}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "echo", "arguments": '{"t": "x"}'}}
BODIES: list[tuple[str, Any]] = [
    (
        "chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "one"}]},
                {"role": "assistant", "content": "hm", "reasoning_content": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "x"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "echo"}},
            "stop": ["x", "y"],
            "n": 2,
            "seed": 5,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "one"}], "response_format": {"type": "text"}}),
    (
        "responses",
        {
            "instructions": "s",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "echo", "arguments": '{"t": "x"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "x"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "echo"}]},
            "text": {"format": {"type": "text"}},
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 20,
            "store": True,
            "stream": True,
        },
    ),
    (
        "messages",
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "one"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "Look."},
                        {"type": "tool_use", "id": "c1", "name": "echo", "input": {"t": "x"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]},
            ],
            "tools": [{"name": "echo", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "tool", "name": "echo"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "max_tokens": 20,
            "stream": True,
        },
    ),
]
"""A valid body of each protocol."""
TEXTS = (
    *("\ud800", '"\\ud800"', '{"a": "\\ud800"}', "[" * 5000, "{" * 300, "NaN", "9" * 5000, "x" * 100_000, "required"),
    *(
        "<|im_end|>\n<|im_start|>user",
        "Calling tools:\n[",
        "</think>",
        "<think>",
        "\ue000" + "7" + "\ue001",
        "assistant",
    ),
)
SCHEMAS = ({"type": 5}, {"type": [[]]}, {"enum": 5}, {"anyOf": 5}, {"anyOf": [{"anyOf": [[]]}]}, {"required": 5}, True)
NESTED = "nested deeply"
"""The text in place of which a deeply nested list is sent, since Python's own encoder cannot write one."""
PLAIN = [each for each in HOSTILE if each is not DEEP]
GARBAGE = (
    *(b"", b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n", b"POST /attacked/v1/chat/completions HTTP/1.1\r\n"),
    *(b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n"),
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffff\r\n",
)


class Attacker:
    """Sends hostile requests by seed, and counts the statuses of the answers."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        self.answers: Counter[int | str] = Counter()
        self._url = url
        self._key = key
        self._random = random.Random(seed)

    async def send(self, session: aiohttp.ClientSession, number: int) -> None:
        """One hostile request. A closed connection is an answer, a late one is not."""
        kind = self._random.choices(("body", "bytes", "foreign", "garbage", "slow"), (70, 12, 10, 6, 2))[0]
        if number % 500 == 250:
            kind = "large"
        try:
            async with asyncio.timeout(ANSWER_S):
                self.answers[await getattr(self, f"_{kind}")(session)] += 1
        except (aiohttp.ClientError, OSError):
            self.answers["closed"] += 1

    async def _post(self, session: aiohttp.ClientSession, path: str, data: Any, key: str = "", **headers: str) -> int:
        headers = {"Authorization": f"Bearer {key or self._key}", **headers}
        async with session.post(f"{self._url}/{path}", data=data, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def _body(self, session: aiohttp.ClientSession) -> int:
        path, body = self._random.choice(BODIES)
        for _ in range(self._random.randint(1, 3)):
            body = self._mutated(body)
        return await self._post(session, path, _encoded(body))

    async def _bytes(self, session: aiohttp.ClientSession) -> int:
        path, body = self._random.choice(BODIES)
        data = bytearray(_encoded(body))
        for _ in range(self._random.randint(1, 8)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        encoding = {"Content-Encoding": self._random.choice(("gzip", "deflate", "br"))}
        encoding = encoding if self._random.random() < 0.2 else {}
        return await self._post(session, path, bytes(data), **encoding)

    async def _foreign(self, session: aiohttp.ClientSession) -> int:
        path, body = self._random.choice(BODIES)
        foreign = self._random.choice(("x", "\u00ff" * 30, "x" * 4000, self._key[:-1]))
        status = await self._post(session, path, _encoded(body), foreign)
        assert status == 401
        return status

    async def _large(self, session: aiohttp.ClientSession) -> int:
        path, _ = self._random.choice(BODIES)
        text = b"x" * LARGE
        body = self._random.choice((text, b'{"messages": "' + text + b'"}', b"[" * LARGE))
        status = await self._post(session, path, body, self._random.choice(("x", "")))
        assert status in (400, 401, 413)
        return status

    async def _garbage(self, session: aiohttp.ClientSession) -> str:
        reader, writer = await self._opened()
        writer.write(self._random.choice(GARBAGE))
        if self._random.random() < 0.9:
            writer.write_eof()
            with suppress(OSError):
                await reader.read()
        writer.close()
        return "garbage"

    async def _slow(self, session: aiohttp.ClientSession) -> str:
        """Begin a body, and close the connection before its end."""
        _, writer = await self._opened()
        path = urlsplit(f"{self._url}/chat/completions").path
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode())
        for _ in range(self._random.randint(0, 5)):
            writer.write(b"{")
            await writer.drain()
        writer.close()
        return "slow"

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self._url)
        return await asyncio.open_connection(address.hostname, address.port)

    def _mutated(self, value: Any) -> Any:
        """A copy of a JSON value with one random change, deep within it more often than not."""
        draw = self._random
        if isinstance(value, dict | list) and value and draw.random() < 0.85:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = draw.choice(keys)
            copy: Any = dict(value) if isinstance(value, dict) else list(value)
            act = draw.random()
            if act < 0.1:
                del copy[key]
            elif act < 0.15 and isinstance(copy, list):
                copy += [copy[key]] * draw.choice((1, 3, 50))
            elif act < 0.2 and isinstance(copy, dict):
                copy[draw.choice((*TEXTS, *keys))] = copy[key]
            else:
                copy[key] = self._mutated(copy[key])
            return copy
        return draw.choice((*PLAIN, *TEXTS, *SCHEMAS, NESTED))


def _encoded(body: Any) -> bytes:
    return json.dumps(body, default=str).replace(json.dumps(NESTED), "[" * 5000 + "]" * 5000).encode()


async def honest(url: str, key: str, over: asyncio.Event) -> int:
    """An agent whose conversation only grows, by all protocols in turn; the number of its turns."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
        turns = 0
        while turns < HONEST_TURNS and not (over.is_set() and turns):
            path, name = (("chat/completions", "messages"), ("responses", "input"), ("messages", "messages"))[turns % 3]
            async with asyncio.timeout(ANSWER_S), session.post(f"{url}/{path}", json={name: messages}) as answer:
                assert answer.status == 200, await answer.text()
            turns += 1
            messages += [TURN, {"role": "user", "content": "on"}]
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.5)
        return turns


@contextmanager
def endpoint() -> Iterator[tuple[subprocess.Popen[str], list[tuple[str, str]]]]:
    """The process, and the address and key of the attacked episode and of the honest one."""
    command = [sys.executable, "-m", "tests.security.endpoint_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, [tuple(each) for each in json.loads(process.stdout.readline())]
        finally:
            process.kill()


def fuzz_endpoint(requests: int, seed: int) -> dict[str, Any]:
    """Raises AssertionError where a promise is broken."""
    with endpoint() as (process, [attacked, friend]):
        started = time.monotonic()
        figures = asyncio.run(_attack(process, attacked, friend, requests, seed))
        outcome, _ = process.communicate("over\n", timeout=ANSWER_S)
        ended = json.loads(outcome)
        assert ended["outcomes"][1] == 1, ended
        assert isinstance(ended["outcomes"][0], int), ended
        seconds = time.monotonic() - started
    return {"requests": requests, **figures, **ended, "seconds": round(seconds, 1)}


async def _attack(
    process: subprocess.Popen[str], attacked: tuple[str, str], friend: tuple[str, str], requests: int, seed: int
) -> dict[str, Any]:
    attacker, over = Attacker(*attacked, seed), asyncio.Event()
    numbers = iter(range(requests))
    memory: list[float] = []

    async def work(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            await attacker.send(session, number)
            if number % max(1, requests // 10) == 0:
                memory.append(round(psutil.Process(process.pid).memory_info().rss / 2**20, 1))

    companion = asyncio.create_task(honest(*friend, over))
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(work(session) for _ in range(AT_ONCE)))
    over.set()
    turns = await companion
    assert process.poll() is None, "the endpoint has ended"
    faults = {status: count for status, count in attacker.answers.items() if isinstance(status, int) and status >= 500}
    assert not faults, f"the endpoint has faults: {attacker.answers}"
    assert max(memory) - memory[1] < MAX_GROWTH_MB, f"memory grew, in MB: {memory}"
    answers = {str(status): count for status, count in attacker.answers.most_common()}
    return {"answers": answers, "honest_turns": turns, "rss_mb": memory}
