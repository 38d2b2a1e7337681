"""A server that speaks by hand, and goes wrong as its argument says: `python raw_server.py ACT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(act: str) -> None:
    """Does what `act` says at each call of its tool."""
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
    elif act == "alike":
        answer(request, {"tools": [{**TOOL, "name": name} for name in ("a.b", "a/b")]})
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
        case "stray":
            while True:
                answer({"id": 987654}, TEXT)
        case "line":
            while True:
                sys.stdout.write("x" * (1 << 16))
        case "half":  # of a character, as servers write it that cut a text by its UTF-16 units
            say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": HALF}))
        case "latin":
            line = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": TEXT}).replace("done", "caf\u00e9")
            sys.stdout.buffer.write(f"{line}\n".encode("latin-1"))
            sys.stdout.buffer.flush()
        case "deep":
            nested = "[" * 5000 + "]" * 5000
            say(
                f'{{"jsonrpc":"2.0","id":{request["id"]},"result":{{"content":[],"structuredContent":{{"a":{nested}}}}}}}'
            )
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
HALF = {"content": [{"type": "text", "text": "half \ud83d"}]}
TEXT = {"content": [{"type": "text", "text": "done"}]}


def answer(request: dict[str, object], result: object) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
