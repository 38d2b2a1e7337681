"""Sends an engine's requests to the publisher. The publisher answers them in the order in which they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import zmq.asyncio

from asyncrl.errors import UnavailableError, WireError
from asyncrl.network.keys import CHECK_KEYS, ClientKeys
from asyncrl.network.sockets import connect, send_within
from asyncrl.types import RunIdentity
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES
from asyncrl.wire import Message, decode, encode, run_field


class Requests:
    """A connection to the publisher at `endpoint`, made on first use. `keys` come from network.keys. Every request
    names `run`, and the publisher of another run refuses it.
    """

    def __init__(
        self,
        endpoint: str,
        context: zmq.asyncio.Context,
        *,
        timeout_s: float = 10.0,
        keys: ClientKeys | None = None,
        run: RunIdentity | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._context = context
        self._timeout_s = timeout_s
        self._keys = keys
        self._own_run = run_field(run)
        self._sequence = 0
        self._socket: zmq.asyncio.Socket | None = None
        self._breaks: zmq.asyncio.Socket | None = None
        self._answered = False

    def reset(self) -> None:
        """Drop the connection with all outstanding requests. The next call makes a new connection."""
        if self._socket is not None and self._breaks is not None:
            self._socket.disable_monitor()
            self._breaks.close(0)
            self._socket.close()
            self._socket = self._breaks = None
        self._answered = False

    async def ask(self, kind: str, body: Mapping[str, Any]) -> Message:
        """Send a request and wait for its answer. Raises the errors of `send` and `receive`."""
        return await self.receive(await self.send(kind, body))

    async def send(self, kind: str, body: Mapping[str, Any]) -> int:
        """Send a request and return its sequence number.

        Raises UnavailableError: ZeroMQ does not accept the request in time, because the publisher refused the
        connection.
        """
        self._sequence += 1
        socket, _ = self._connected()
        frames = encode(Message(kind, self._sequence, {**body, **self._own_run}))
        try:
            await send_within(self._timeout_s, socket, frames)
        except TimeoutError:
            raise self._silent() from None
        return self._sequence

    async def receive(self, sequence: int) -> Message:
        """Wait for the answer to the oldest request outstanding, which must be `sequence`.

        Raises UnavailableError: the publisher is silent for too long, or the connection broke. WireError: the publisher
        refuses (for example because it belongs to another run), or its answer is malformed.
        """
        frames = await self._frames()
        self._answered = True
        reply = decode([frame.buffer for frame in frames], MAX_MANIFEST_BYTES)
        if reply.kind == "refused":
            raise WireError(f"the weight publisher at {self.endpoint} refused: {reply.body.get('reason')}")
        if reply.sequence != sequence:
            raise WireError(f"the weight publisher answered request {reply.sequence} instead of {sequence}")
        return reply

    async def _frames(self) -> list[zmq.Frame]:
        socket, breaks = self._connected()
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(socket.recv_multipart(copy=False))]
        # A publisher that never answered may refuse the keys and break the connection. Then the wait lasts until the
        # timeout, whose error gives advice about the keys.
        if self._answered:
            waits.append(asyncio.ensure_future(breaks.recv_multipart()))
        try:
            done, _ = await asyncio.wait(waits, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits[1:] if waits[0].done() else waits:
                wait.cancel()
        if waits[0] in done:
            return list(waits[0].result())
        if done:
            raise UnavailableError(f"the connection to the weight publisher at {self.endpoint} broke")
        raise self._silent()

    def _silent(self) -> UnavailableError:
        advice = f"; {CHECK_KEYS}" if self._keys else ""
        return UnavailableError(
            f"the weight publisher at {self.endpoint} has been silent for {self._timeout_s:g} s{advice}"
        )

    def _connected(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Return the connection, and the socket that reports when the connection breaks."""
        if self._socket is None or self._breaks is None:
            self._socket = connect(self._context, self.endpoint, self._keys, max(MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES))
            self._breaks = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return self._socket, self._breaks
