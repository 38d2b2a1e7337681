"""Servers at a URL that answer in wrong ways: each fails its episode in bounded time and memory, and nothing else."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.tools.mcp.test_mcp_tools import actor, episode, run

pytestmark = pytest.mark.slow

TEXT = {"content": [{"type": "text", "text": "done"}]}
TOOL = {"name": "act", "inputSchema": {"type": "object"}}
NOTICE = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}}


class Hostile(ThreadingHTTPServer):
    """Does `act` at each call of its tool. `requests` are methods and the header X-Key of all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.act = ""
        self.elsewhere = ""
        self.requests: list[tuple[str, str | None]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/mcp"


class Handler(BaseHTTPRequestHandler):
    server: Hostile

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.headers["X-Key"]))
        self.reply(405, "text/plain", b"")

    do_DELETE = do_GET  # noqa: N815 - its name is that of the method of HTTP

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((request["method"], self.headers["X-Key"]))
        match request["method"]:
            case "initialize":
                version = request["params"]["protocolVersion"]
                capable = {"capabilities": {"tools": {}}, "serverInfo": {"name": "hostile", "version": "1"}}
                self.result(request, {"protocolVersion": version, **capable})
            case "tools/list":
                self.result(request, {"tools": [TOOL]})
            case "tools/call":
                with suppress(ConnectionError):
                    self.call(request)
            case _:
                self.reply(202, "application/json", b"")

    def call(self, request: dict[str, Any]) -> None:
        match self.server.act:
            case "page":
                self.reply(200, "text/html", b"<html>Welcome</html>")
            case "rubbish":
                self.reply(200, "application/json", b'{"jsonrpc": 7}')
            case "down":
                self.reply(503, "text/plain", b"down")
            case "hang":
                self.server.over.wait(60)
            case "large":
                self.result(request, {"content": [{"type": "text", "text": "x" * (9 << 20)}]})
            case "bomb":
                body = gzip.compress(b" " * (100 << 20))
                self.reply(200, "application/json", body, ("Content-Encoding", "gzip"))
            case "redirect":
                self.reply(307, "text/plain", b"", ("Location", self.server.elsewhere))
            case "flood" | "events":
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                events = 100_000 if self.server.act == "flood" else 3
                result = {"jsonrpc": "2.0", "id": request["id"], "result": TEXT}
                for message in [*[NOTICE] * events, result]:
                    self.wfile.write(f"event: message\ndata: {json.dumps(message)}\n\n".encode())

    def result(self, request: dict[str, Any], result: object) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()
        self.reply(200, "application/json", body, ("Mcp-Session-Id", "s1"))

    def reply(self, status: int, kind: str, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with Hostile() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("act", "shown"),
    [
        ("events", "^done$"),
        ("large", "Error: the result is larger than 8 MiB; ask for less"),
        ("flood", "Error: the result is larger than 8 MiB; ask for less"),
        ("page", "`execute` failed 2 times, .*Unexpected content type: text/html"),
        ("rubbish", "`execute` failed 2 times, .*Failed to parse JSON response"),
        ("down", "`execute` failed 2 times, .*Server returned an error response"),
        ("hang", r"`execute` failed 2 times, .*did not answer within 0\.5 s"),
        ("bomb", "`execute` failed 2 times, .*compressed its response"),
        ("redirect", "`execute` failed 2 times, .*not followed"),
    ],
)
def test_a_server_at_a_url_that_goes_wrong_fails_its_episode_and_nothing_else(hostile: Hostile, act: str, shown: str):
    with Hostile() as other:
        hostile.act, hostile.elsewhere = act, other.url
        config = actor(s={"url": hostile.url, "headers": {"X-Key": "k1"}, "timeout_s": 0.5 if act == "hang" else 60})
        (answer,), counts = run(config, episode("act"))
        assert not other.requests, "no header of a server goes elsewhere"
    assert re.search(shown, answer.replace("\n", " ")), answer
    assert counts["mcp_sessions"] == 0
    assert {key for _, key in hostile.requests} == {"k1"}
    assert "GET" not in [method for method, _ in hostile.requests]


def test_a_call_that_hangs_ends_no_session_that_other_episodes_have_at_a_url(hostile: Hostile):
    hostile.act = "hang"
    (answer,), counts = run(actor(s={"url": hostile.url, "shared": True, "timeout_s": 0.3}), episode("act"))
    assert re.search(r"`execute` failed 2 times, .*did not answer within 0\.3 s", answer)
    assert (counts["mcp_started"], counts["mcp_lost"], counts["tool_failures"]) == (1, 0, 2)
    assert [method for method, _ in hostile.requests].count("initialize") == 2, "one of them asked for the tools"
