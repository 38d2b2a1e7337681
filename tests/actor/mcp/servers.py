"""Servers that tests start as programs: `python servers.py NAME [ARGUMENT]`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def counter() -> None:
    """Keeps a number, and answers in all ways in which a server can."""
    from mcp.server.mcpserver import Image, MCPServer

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
    def die() -> str:
        """Ends the server."""
        os._exit(3)

    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()


def raw() -> None:
    """Speaks by hand: does what the second argument says at each call of its tool `act`."""
    act = sys.argv[2]
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        if request["method"] == "initialize":
            answer(
                request,
                {
                    "protocolVersion": request["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "raw", "version": "1"},
                },
            )
        elif request["method"] == "tools/list":
            list_tools(request, act)
        else:
            call(request, act)


def list_tools(request: dict[str, object], act: str) -> None:
    if act == "endless":
        answer(request, {"tools": [TOOL], "nextCursor": "again"})
    elif act == "many":
        answer(request, {"tools": [{**TOOL, "name": f"act{number}"} for number in range(1000)]})
    elif act == "dotted":
        answer(request, {"tools": [{**TOOL, "name": "files.act/now"}]})
    elif act == "calculator":
        answer(request, {"tools": [{**TOOL, "name": act}]})
    else:
        answer(request, {"tools": [TOOL]})


def call(request: dict[str, object], act: str) -> None:
    global count
    match act:
        case "flood":  # 100 MB in one line
            sys.stdout.write(f'{{"jsonrpc":"2.0","id":{request["id"]},"result":{{"content":[{{"type":"text","text":"')
            for _ in range(100):
                sys.stdout.write("x" * 1_000_000)
            say('"}]}}')
        case "rubbish":
            while True:
                say("this is no message")
        case "hang":
            time.sleep(1000)
        case "error":
            error = {"code": -32000, "message": "no disk"}
            say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}))
        case "wrong":
            answer(request, {"content": 5})
        case "noise":
            say("Starting up ...")
            answer(request, TEXT)
        case "count":
            count += 1
            child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL) if count == 1 else None
            answer(request, {"content": [{"type": "text", "text": f"{count} {os.getpid()} {child and child.pid}"}]})
        case "once":  # answers one call, and dies at the next
            count += 1
            if count > 1:
                sys.exit(3)
            answer(request, TEXT)
        case "variables":
            answer(request, {"content": [{"type": "text", "text": json.dumps(dict(os.environ))}]})
        case _:  # dies until it has been started so many times
            starts = Path(act)
            started = int(starts.read_text()) + 1 if starts.exists() else 1
            starts.write_text(str(started))
            if started < 3:
                sys.stderr.write("out of luck\n")
                sys.exit(7)
            answer(request, TEXT)


count = 0
TOOL = {"name": "act", "description": "Acts.", "inputSchema": {"type": "object", "properties": {}}}
TEXT = {"content": [{"type": "text", "text": "done"}]}


def answer(request: dict[str, object], result: object) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"counter": counter, "raw": raw}[sys.argv[1]]()
