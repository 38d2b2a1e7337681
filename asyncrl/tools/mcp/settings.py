"""Reads the servers of `actor.mcp_servers`, with the keys that other MCP clients use.

The entry of a server that asyncrl starts has {command, args, env}. The entry of a server that runs already has {url,
headers}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from asyncrl.config.schema import ActorConfig
from asyncrl.config.schema.actor import MOST_AT_ONCE
from asyncrl.config.variables import with_variables
from asyncrl.errors import ConfigError
from asyncrl.masking import masked

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class McpServer:
    """One server. It is hashable, so that its list of tools can be cached.

    - `command`: the program and its arguments; empty if there is a `url`.
    - `tools`: the server's own names of the tools that the policy gets; empty for all tools. The policy sees these
      names with `prefix` in front.
    - `shared`: true if one session serves all episodes. `sessions`: the maximum number of episodes that have a session
      at once.
    - `start_s`, `timeout_s`: how many seconds a start may take, and how many seconds a call may take.
    """

    name: str
    command: tuple[str, ...] = ()
    env: Pairs = ()
    cwd: str | None = None
    url: str | None = None
    headers: Pairs = ()
    tools: tuple[str, ...] = ()
    prefix: str = ""
    shared: bool = False
    sessions: int = 64
    start_s: float = 60.0
    timeout_s: float = 10.0

    @property
    def setting(self) -> str:
        """The configuration key of this server, for messages."""
        return f"actor.mcp_servers.{self.name}"

    def filled(self, pairs: Pairs, variables: Mapping[str, str]) -> dict[str, str]:
        """Replace $NAME in `env` or `headers` by the value of NAME in `variables`. Raises ConfigError: a variable is
        missing."""
        return {name: with_variables(text, self.setting, variables) for name, text in pairs}


KEYS = ("command", "args", *(field.name for field in fields(McpServer)[2:]))
"""The keys of a server, in the order of the documentation."""


def read_servers(actor: ActorConfig) -> list[McpServer]:
    """Read the servers, in the order of their names. Raises ConfigError: an entry has a wrong key or value."""
    return [_server(name, given, actor) for name, given in sorted(actor.mcp_servers.items())]


def _server(name: str, given: Any, actor: ActorConfig) -> McpServer:
    setting = f"actor.mcp_servers.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{setting}: give {{command: PROGRAM, args: [...]}} or {{url: http://...}} (docs/tools.md)")
    if unknown := [str(key) for key in given if key not in KEYS]:
        raise ConfigError(f"{setting}: there is no key {', '.join(unknown)}; the keys are {', '.join(KEYS)}")
    if ("command" in given) == ("url" in given):
        raise ConfigError(f"{setting}: give either the command that starts the server, or the url of a running server")
    other = {"command": ("headers",), "url": ("args", "env", "cwd")}["url" if "url" in given else "command"]
    if wrong := [key for key in other if key in given]:
        kind = "a url" if "url" in given else "a command"
        raise ConfigError(f"{setting}: a server with {kind} has no {', '.join(wrong)}; leave it out")
    read = _Reader(setting, given)
    url = read.text("url")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{setting}.url: it must begin with http:// or https://")
    command = read.text("command")
    return McpServer(
        name,
        () if command is None else (command, *read.texts("args")),
        read.pairs("env"),
        read.text("cwd"),
        url,
        read.pairs("headers"),
        read.texts("tools"),
        read.text("prefix") or "",
        read.flag("shared"),
        int(read.number("sessions", actor.concurrency or MOST_AT_ONCE, whole=True)),
        read.number("start_s", McpServer.start_s),
        read.number("timeout_s", actor.tool_timeout_s),
    )


class _Reader:
    """Reads the values of one server. If a value is invalid, the method that reads it raises ConfigError, which names
    the key."""

    def __init__(self, setting: str, given: Mapping[str, Any]) -> None:
        self._setting = setting
        self._given = given

    def text(self, key: str) -> str | None:
        return self._checked(key, None, lambda value: isinstance(value, str) and value, "a text")  # type: ignore[no-any-return]

    def texts(self, key: str) -> tuple[str, ...]:
        def fits(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(isinstance(each, str | int | float) for each in value)

        return tuple(map(str, self._checked(key, (), fits, "a list of texts")))

    def pairs(self, key: str) -> Pairs:
        def fits(value: Any) -> bool:
            return isinstance(value, Mapping) and all(isinstance(each, str | int | float) for each in value.values())

        mapping = self._checked(key, {}, fits, "a mapping to texts")
        return tuple((str(name), str(each)) for name, each in mapping.items())

    def flag(self, key: str) -> bool:
        return bool(self._checked(key, False, lambda value: isinstance(value, bool), "true or false"))

    def number(self, key: str, default: float, whole: bool = False) -> float:
        kinds = int if whole else int | float

        def fits(value: Any) -> bool:
            return isinstance(value, kinds) and not isinstance(value, bool) and value > 0

        return self._checked(key, default, fits, f"a {'whole ' if whole else ''}number above 0")  # type: ignore[no-any-return]

    def _checked(self, key: str, default: Any, fits: Any, form: str) -> Any:
        value = self._given.get(key)
        if value is None:
            return default
        if not fits(value):
            raise ConfigError(f"{self._setting}.{key}={masked(value, key)!r:.100}: it must be {form}")
        return value
