"""Connecting sockets, and how a client notices that a connection broke; `listener` has the sockets that they reach.

With keys, CURVE encrypts the connection and authenticates both sides, on loopback too.
"""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

from asyncrl.network.keys import ClientKeys

ANY_SIZE = -1

AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])


def connect(
    context: zmq.Context[AnySocket], endpoint: str, keys: ClientKeys | None, max_message_bytes: int = ANY_SIZE
) -> AnySocket:
    """A DEALER that connects to `endpoint`, now or once a server listens there; with keys, to their server only."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.maxmsgsize = max_message_bytes
    if keys is not None:
        socket.curve_secretkey = keys.secret
        socket.curve_publickey = zmq.curve_public(keys.secret)
        socket.curve_serverkey = keys.server
    socket.connect(endpoint)
    return socket


class Watch:
    """Notices when connections of `socket` break. They break at once where a process dies and its machine lives on."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def broke(self) -> bool:
        """Whether one has broken since the last call."""
        broke = False
        while self._events.poll(0):
            self._events.recv_multipart()
            broke = True
        return broke

    def close(self) -> None:
        """Call it before the socket is closed. A second call does nothing."""
        if not self._events.closed:
            self._socket.disable_monitor()
            self._events.close(0)
