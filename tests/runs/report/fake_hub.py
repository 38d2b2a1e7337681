"""A hub on loopback with the few requests that an upload makes. It keeps what was committed."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = (".safetensors", ".png")
SHA = "0" * 40


class FakeHub:
    """`files` are those of the last commit. `answers` has a status for the next requests of a path's last part, each
    used once; `refused` has one for all. So many answers to commits are `cut` off before their first byte."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.repos: dict[str, bool] = {}
        self.answers: dict[str, list[int]] = {}
        self.refused: dict[str, int] = {}
        self.requests: Counter[str] = Counter()
        self.url = ""
        self.cut = 0

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        kind = next(part for part in reversed(path.split("/")) if part not in ("main", "batch", ""))
        kind = "lfs" if path.startswith("/lfs/") else kind
        self.requests[kind] += 1
        if self.answers.get(kind):
            return self.answers[kind].pop(0), {"error": "not now"}
        if kind in self.refused:
            return self.refused[kind], {"error": "not you"}
        match kind:
            case "whoami-v2":
                return 200, {"type": "user", "name": "someone", "orgs": []}
            case "create":
                return self._create(json.loads(body))
            case "validate-yaml":
                return 200, {"errors": [], "warnings": []}
            case "preupload":
                files = [each["path"] for each in json.loads(body)["files"]]
                return 200, {"files": [self._mode(name) for name in files]}
            case "objects":
                return 200, {
                    "transfer": "basic",
                    "objects": [self._upload(each) for each in json.loads(body)["objects"]],
                }
            case "lfs":
                self.blobs[hashlib.sha256(body).hexdigest()] = body
                return 200, {}
            case "commit":
                return self._commit(body, path)
        repo = path.removeprefix("/api/models/").split("/revision")[0]
        if repo not in self.repos:
            return 404, {"error": "there is none"}
        return 200, {"id": repo, "private": self.repos[repo], "sha": SHA, "tags": [], "siblings": []}

    def _create(self, given: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{given['organization']}/{given['name']}"
        if repo in self.repos:
            return 409, {"error": "it is there", "url": f"{self.url}/{repo}"}
        self.repos[repo] = given.get("private", False) or given.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{repo}"}

    def _mode(self, name: str) -> dict[str, Any]:
        known = self.files.get(name)
        large = name.endswith(LARGE)
        oid = None
        if known is not None:
            blob = hashlib.sha1(b"blob %d\0" % len(known) + known).hexdigest()
            oid = hashlib.sha256(known).hexdigest() if large else blob
        return {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _upload(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["oid"] in self.blobs:
            return given
        return {**given, "actions": {"upload": {"href": f"{self.url}/lfs/{given['oid']}"}}}

    def _commit(self, body: bytes, path: str) -> tuple[int, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]
        repo = path.removeprefix("/api/models/").partition("/commit")[0]
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{SHA}", "commitOid": SHA}


@contextmanager
def serving() -> Iterator[FakeHub]:
    """A hub that answers at `url`."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, reply = hub.reply(self.command, self.path.partition("?")[0], body)
            if hub.cut and "/commit/" in self.path:
                hub.cut -= 1
                self.close_connection = True
                return
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815 - the server looks for these names

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
