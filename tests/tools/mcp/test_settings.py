"""Descriptions of servers are read, and wrong ones are refused before a server starts."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError
from asyncrl.tools.mcp.settings import read_servers


def test_a_server_is_described_as_other_programs_do():
    given = {
        "web": {"url": "http://127.0.0.1:1/mcp", "headers": {"X": "$KEY $$5"}, "shared": True, "timeout_s": 3},
        "files": {"command": "npx", "args": ["-y", "server", 5], "env": {"HOME": "/tmp"}, "tools": ["read"]},
    }
    files, web = read_servers(ActorConfig(mcp_servers=given, concurrency=7, tool_timeout_s=2.5))
    assert (files.command, files.tools, files.sessions, files.timeout_s) == (
        ("npx", "-y", "server", "5"),
        ("read",),
        7,
        2.5,
    )
    assert (web.shared, web.timeout_s) == (True, 3)
    assert web.filled(web.headers, {"KEY": "secret"}) == {"X": "secret $5"}
    with pytest.raises(ConfigError, match=r"actor\.mcp_servers\.web: .* no variable KEY"):
        web.filled(web.headers, {})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("npx", r"files: give \{command"),
        ({}, "either the command"),
        ({"command": "npx", "url": "http://x"}, "either the command"),
        ({"command": ["npx"]}, r"files\.command=\['npx'\]: it must be a text"),
        ({"command": "npx", "arg": []}, "no key arg; the keys are command, args, env"),
        ({"command": "npx", "headers": {}}, "a server with a command has no headers"),
        ({"url": "http://x", "env": {}}, "a server with a url has no env"),
        ({"url": "file:///etc/passwd"}, "must begin with http"),
        ({"command": "npx", "sessions": 0}, r"files\.sessions=0: it must be a whole number above 0"),
        ({"command": "npx", "timeout_s": True}, r"files\.timeout_s=True: it must be a number"),
        ({"command": "npx", "shared": "yes"}, "true or false"),
        ({"command": "npx", "env": {"A": None}}, "a mapping to texts"),
    ],
)
def test_a_server_that_is_described_badly_is_refused_by_its_key(given: object, reason: str):
    with pytest.raises(ConfigError, match=reason):
        read_servers(ActorConfig(mcp_servers={"files": given}))
