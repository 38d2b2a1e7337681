"""Requests the lists of tools of MCP servers, checks and names the tools, and makes a class of each tool."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from asyncrl.config.schema import ActorConfig
from asyncrl.data.sendable import schemas
from asyncrl.errors import ConfigError
from asyncrl.masking import masked
from asyncrl.text import encodable
from asyncrl.tools.base import Service, Tool, ToolRefusal
from asyncrl.tools.mcp.settings import McpServer, read_servers
from asyncrl.tools.results import Content

MAX_TOOLS = 128
"""The maximum number of tools of one server. There is a limit because each prompt lists all tools."""

MAX_NAME = 64
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")

Function = Mapping[str, Any]


class McpTool(Tool):
    """A tool of a server. `listed` is the server's own name for it."""

    listed: ClassVar[str]
    limits_itself = True

    async def execute(self, arguments: Mapping[str, Any]) -> Content:
        answer: Content = await self.session.call(self.listed, arguments)
        return answer


def mcp_functions(actor: ActorConfig) -> dict[str, Function]:
    """The function objects of all servers by the names that the policy uses. Raises ConfigError: a server or one of its
    tools cannot be used."""
    return {str(function["name"]): function for _, _, function in _offered(actor)}


def mcp_classes(actor: ActorConfig, shows_images: bool = False) -> dict[str, type[Tool]]:
    """Make a class for each tool, by the name that the policy uses. The tools of one server share a service.

    `shows_images` is true if the policy sees images. Raises ConfigError: a server or one of its tools cannot be used.
    """
    if not actor.mcp_servers:
        return {}
    from asyncrl.tools.mcp.service import McpService

    services: dict[str, Service] = {}
    classes: dict[str, type[Tool]] = {}
    for server, listed, function in _offered(actor):
        service = services.setdefault(server.name, McpService(server, shows_images))
        parts = {"listed": listed, "schema": function, "service": service}
        classes[function["name"]] = type("McpTool", (McpTool,), parts)
    return classes


def _offered(actor: ActorConfig) -> list[tuple[McpServer, str, Function]]:
    """List for each tool its server, the server's own name for the tool, and the function object for the policy."""
    offered: dict[str, tuple[McpServer, str, Function]] = {}
    for server in read_servers(actor):
        _check_installed(server)
        for listed, function in _listed(server).items():
            name = str(function["name"])
            if name in offered:
                other = offered[name][0]
                if other is server:
                    both = f"{offered[name][1]}, {listed}"
                    raise ConfigError(f"{server.setting} has two tools that become {name} ({both}); choose its tools")
                raise ConfigError(
                    f"{server.setting} offers {name} as {other.setting} does; set its prefix, or choose its tools"
                )
            offered[name] = server, listed, function
    return list(offered.values())


def _check_installed(server: McpServer) -> None:
    try:
        # An older version of the package lacks names that this module imports.
        import_module("asyncrl.tools.mcp.session")
    except ImportError as error:
        raise ConfigError(f"{server.setting} needs the package mcp: pip install 'asyncrl[mcp]' ({error})") from error


@cache
def _listed(server: McpServer) -> Mapping[str, Function]:
    """The function object of each tool, by the server's own names. Raises ConfigError: the server or one of its tools
    cannot be used.

    The first call starts the server to read the list, and ends it again. Later calls use the cached list.
    """
    # The coroutine runs in a new thread, because the calling thread may already have a running event loop.
    with ThreadPoolExecutor(1) as thread:
        tools = thread.submit(lambda: asyncio.run(_request_tools(server))).result()
    chosen = _chosen(server, tools)
    return {name: _function(server, name, chosen[name]) for name in chosen}


async def _request_tools(server: McpServer) -> Sequence[Any]:
    from asyncrl.tools.mcp.service import link_to
    from asyncrl.tools.mcp.session import AnswerError, Session, SessionError

    try:
        session = await Session.open(link_to(server), server)
        try:
            return await session.tools()
        finally:
            await session.close()
    except (SessionError, AnswerError, ToolRefusal) as error:
        what = " ".join(masked(server.command)) or server.url
        raise ConfigError(f"{server.setting} does not list its tools: {error} ({what})") from error


def _chosen(server: McpServer, tools: Iterable[Any]) -> dict[str, Any]:
    """The tools on offer, by the server's own names."""
    listed = {tool.name: tool for tool in tools}
    names = server.tools or tuple(listed)
    if unknown := [name for name in names if name not in listed]:
        some = ", ".join(list(listed)[:MAX_TOOLS])
        raise ConfigError(f"{server.setting}.tools: the server does not list {', '.join(unknown)}; it has {some}")
    if len(names) > MAX_TOOLS:
        raise ConfigError(
            f"{server.setting} lists {len(names)} tools; choose at most {MAX_TOOLS} of them, such as "
            f"tools=[{', '.join(names[:3])}]"
        )
    if not names:
        raise ConfigError(f"{server.setting} lists no tools; leave it out")
    return {name: listed[name] for name in names}


def _function(server: McpServer, name: str, tool: Any) -> Function:
    """Make an OpenAI function object of a tool. Raises ConfigError: its name or its schema cannot be used."""
    shown = _NO_NAME.sub("_", server.prefix + name)
    if len(shown) > MAX_NAME:
        raise ConfigError(f"{server.setting}: the name {shown} has more than {MAX_NAME} letters; choose other tools")
    parameters = {"type": "object", "properties": {}, **tool.input_schema}
    try:
        (function,) = schemas(
            encodable({"name": shown, "description": tool.description or "", "parameters": parameters})
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{server.setting}: the schema of {name} cannot be used: {error}") from error
    if not isinstance(parameters["properties"], dict):
        raise ConfigError(f"{server.setting}: the schema of {name} has no mapping of properties")
    result: Function = function
    return result
