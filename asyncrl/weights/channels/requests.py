"""An engine's questions to the publisher's socket, answered in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import zmq.asyncio

from asyncrl.errors import UnavailableError, WireError
from asyncrl.network.keys import CHECK_KEYS, ClientKeys
from asyncrl.network.sockets import connect
from asyncrl.types import RunIdentity
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES
from asyncrl.wire import Message, decode, encode, run_field


class Requests:
    """A connection to the publisher at `endpoint`; `keys` are those of network.keys. It connects when first used.

    `run` goes with every request, and the publisher of another one refuses it.
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

    def reset(self) -> None:
        """Drop the connection with everything outstanding; the next call makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def ask(self, kind: str, body: Mapping[str, Any]) -> Message:
        """The answer to a request. Raises as `receive` does."""
        return await self.receive(await self.send(kind, body))

    async def send(self, kind: str, body: Mapping[str, Any]) -> int:
        """Send a request; its sequence number."""
        self._sequence += 1
        await self._connected().send_multipart(encode(Message(kind, self._sequence, {**body, **self._own_run})))
        return self._sequence

    async def receive(self, sequence: int) -> Message:
        """The answer to the oldest request outstanding, which must be `sequence`.

        Raises UnavailableError: the publisher is silent for too long; WireError: it refuses (it is another run's, for
        one) or answers nonsense.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                frames = await self._connected().recv_multipart(copy=False)
        except TimeoutError:
            advice = f"; {CHECK_KEYS}" if self._keys else ""
            raise UnavailableError(
                f"the weight publisher at {self.endpoint} has been silent for {self._timeout_s:g} s{advice}"
            ) from None
        reply = decode([frame.buffer for frame in frames], MAX_MANIFEST_BYTES)
        if reply.kind == "refused":
            raise WireError(f"the weight publisher at {self.endpoint} refused: {reply.body.get('reason')}")
        if reply.sequence != sequence:
            raise WireError(f"the weight publisher answered request {reply.sequence} instead of {sequence}")
        return reply

    def _connected(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            self._socket = connect(self._context, self.endpoint, self._keys, max(MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES))
        return self._socket
