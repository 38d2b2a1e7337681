"""The client's side of a connection: it connects, limits how long a send may wait, and notices when the connection
breaks.

With keys, CURVE encrypts the connection and authenticates both sides, on loopback too. `listener.py` has the server's
side.

ZeroMQ gives up a connection whose handshake the server refused, and tells the client nothing. A plain send over it
would never return. So every client of this package sends by `try_send`, or by `send_within` in an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from asyncrl.network.keys import ClientKeys

ANY_SIZE = -1

AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])


def connect(
    context: zmq.Context[AnySocket], endpoint: str, keys: ClientKeys | None, max_message_bytes: int = ANY_SIZE
) -> AnySocket:
    """Return a DEALER that connects to `endpoint` once a server listens there. With `keys`, it connects only to the
    server that they name."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.maxmsgsize = max_message_bytes
    if keys is not None:
        socket.curve_secretkey = keys.secret
        socket.curve_publickey = zmq.curve_public(keys.secret)
        socket.curve_serverkey = keys.server
    socket.connect(endpoint)
    return socket


def try_send(socket: zmq.Socket[bytes], frames: Sequence[Any], copy: bool = True) -> bool:
    """Send a message without waiting. Returns False if the connection was refused, or its queue is full."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return False
    return True


async def send_within(seconds: float, socket: zmq.asyncio.Socket, frames: Sequence[Any]) -> None:
    """Send a message, and wait at most `seconds` until the connection takes it. Raises TimeoutError: it was not
    taken."""
    # `asyncio.wait_for` is not used here: it lets the event loop run between the end of the send and its own return,
    # and pyzmq then sometimes misses answers.
    async with asyncio.timeout(seconds):
        await socket.send_multipart(frames)


class Watch:
    """Notices when connections of `socket` break. If the peer's process ends, this is noticed at once. If the peer's
    machine fails, this is noticed late or never."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def broke(self) -> bool:
        """True if a connection has broken since the last call."""
        broke = False
        while self._events.poll(0):
            self._events.recv_multipart()
            broke = True
        return broke

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed. A second call does nothing."""
        if not self._events.closed:
            self._socket.disable_monitor()
            self._events.close(0)
