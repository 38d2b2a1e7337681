"""A process that speaks SGLang's protocol and answers immediately, so that only the client's cost is measured.

It samples nothing: each length of answer is made once, with log-probs of as many digits as real ones. Requests that
name stop ids get the given turns, one after another.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

VOCABULARY = 4096
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_COUNT = re.compile(rb'"max_new_tokens": *(\d+)')
_STOP = re.compile(rb'"stop_token_ids": *\[\d')
_LABEL = re.compile(rb'"weight_version": *"([^"]*)"')


@contextmanager
def instant_server(turns: Sequence[Sequence[int]] = ()) -> Iterator[str]:
    """Start the server, and yield its URL. `turns` answer requests with stop ids, and end with such an id."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, turns), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection, turns: Sequence[Sequence[int]]) -> None:
    async def main() -> None:
        server = await asyncio.start_server(InstantServer(turns).connected, "127.0.0.1", 0, limit=1 << 26)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


class InstantServer:
    """The server. Its only state is the label of the newest weights."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = [list(turn) for turn in turns]
        self._label = "default"
        self._requests = 0
        self._answers: dict[int, bytes] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                answer = self._answer(head.split(b" ", 2)[1], body)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(answer) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, path: bytes, body: bytes) -> bytes:
        if path == b"/generate":
            count = _COUNT.search(body)
            assert count is not None
            if not _STOP.search(body):
                return self._generated(int(count[1]))
            self._requests += 1
            return self._generated(-1 - self._requests % len(self._turns))
        if path in (b"/server_info", b"/get_server_info"):
            return b'{"version": "0.5.23", "tp_size": 1}'
        if path == b"/model_info":
            return json.dumps({"weight_version": self._label}).encode()
        if label := _LABEL.search(body):
            self._label = label[1].decode()
            self._answers.clear()
        return b"{}"

    def _generated(self, count: int) -> bytes:
        """An answer of `count` tokens. If `count` is negative, it is the turn with the index -1 - `count`."""
        if count not in self._answers:
            rng = np.random.default_rng(abs(count))
            ids, finish = rng.integers(0, VOCABULARY, max(0, count)).tolist(), {"type": "length", "length": count}
            if count < 0:
                ids = self._turns[-1 - count]
                finish = {"type": "stop", "matched": ids[-1]}
            logprobs = (-8 * rng.random(len(ids))).astype(np.float32).tolist()
            meta = {
                "completion_tokens": len(ids),
                "finish_reason": finish,
                "weight_version": self._label,
                "weight_versions": [{"version": self._label, "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
            }
            self._answers[count] = json.dumps({"output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()
        return self._answers[count]
