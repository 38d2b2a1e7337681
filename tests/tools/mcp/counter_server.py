"""A server that is made with the package `mcp`, over stdio or at a port: `python counter_server.py [PORT]`. It keeps a
number, and answers in all ways in which a server can."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("counter")
state = {"count": 0}


@server.tool(structured_output=False)
def add(number: int) -> str:
    """Adds to the count and tells it."""
    state["count"] += number
    return str(state["count"])


@server.tool()
def describe() -> dict[str, int]:
    """Tells the count as an object."""
    return state


@server.tool(structured_output=False)
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool(structured_output=False)
def picture() -> list[object]:
    """Shows an image."""
    return ["here it is", Image(data=b"1234", format="png")]


@server.tool(structured_output=False)
def long(characters: int) -> str:
    """Answers with a long text."""
    return "x" * characters


@server.tool(structured_output=False)
def who(context: Context) -> str:  # type: ignore[type-arg]
    """Tells the key and the session of the client."""
    headers = context.headers or {}
    return f"{headers.get('x-key')} {headers.get('mcp-session-id')}"


@server.tool(structured_output=False)
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
