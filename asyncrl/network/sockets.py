"""All sockets of the project: a server listens, clients connect, and keys keep everybody else out.

With keys, CURVE encrypts the connection and authenticates both sides, on loopback too.
"""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

from asyncrl.errors import UnavailableError
from asyncrl.network.gate import Gate
from asyncrl.network.keys import ClientKeys, ServerKeys

ANY_SIZE = -1
DOMAIN = b"asyncrl"
PEER_MESSAGES = 64
"""Messages that wait for or from one peer. An honest client has half as many under way, since ZeroMQ reports room only
when half of the queue was read. A slow reader takes no more memory: it loses further replies, and asks again."""

AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])


class Listener:
    """A bound ROUTER at `endpoint`, and its gate. A message to an unknown client raises ZMQError."""

    def __init__(self, socket: zmq.Socket[bytes], gate: Gate) -> None:
        self.socket = socket
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._gate = gate

    @property
    def failed_handshakes(self) -> int:
        return self._gate.failed_handshakes

    def close(self) -> None:
        self._gate.close()
        self.socket.close()


def listen(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ServerKeys | None, max_message_bytes: int
) -> Listener:
    """Listen at `endpoint` for the clients that `keys` accepts, or for every client where it is None.

    A peer that sends a frame of more than `max_message_bytes` is cut off. Raises UnavailableError: the address is taken
    or not this machine's.
    """
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.router_mandatory = True
    socket.sndhwm = socket.rcvhwm = PEER_MESSAGES
    socket.maxmsgsize = max_message_bytes
    if keys is not None:
        require_keys(socket, keys)
    gate: Gate | None = None
    try:
        gate = Gate(context, socket, keys.allowed if keys else None)
        socket.bind(endpoint)
    except (zmq.ZMQError, UnavailableError) as error:
        if gate:
            gate.close()
        socket.close()
        raise UnavailableError(f"cannot listen at {endpoint}: {error}") from error
    return Listener(socket, gate)


def require_keys(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Encrypt the connections of a listening socket, and refuse clients that no gate accepts."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    # Without these, ZeroMQ accepts every client with the server's public key where no gate answers.
    socket.zap_domain = DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


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
