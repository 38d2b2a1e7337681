"""The gate of a listening socket: it accepts the clients whose keys are in a list, and counts failed handshakes.

It answers libzmq's authentication requests (ZAP, RFC 27). A handshake fails where the client has no keys, keys for
another server or keys that are not in the list, or does not speak ZeroMQ.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.network.keys import allowed_keys
from asyncrl.network.throttle import Throttled

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not in the list of allowed clients",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has no keys or keys of another run, or speaks no ZeroMQ",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it left in the handshake; it may have no keys",
}


class Gate:
    """Guards `socket`, which is not bound yet, in a thread of its own until `close`.

    `allowed` is the file with the list of clients; a context can have one gate with a list. None accepts every client.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], allowed: Path | None
    ) -> None:
        self.failed_handshakes = 0
        self._socket = socket
        self._warnings = Throttled(logger, "a client was refused")
        self._authenticator = None if allowed is None else _Authenticator(context, allowed)
        self._events = socket.get_monitor_socket(sum(FAILED) | zmq.EVENT_MONITOR_STOPPED)
        self._thread = threading.Thread(target=self._run, name="network-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more clients. The socket stays open."""
        self._socket.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        if self._authenticator:
            poller.register(self._authenticator.requests, zmq.POLLIN)
        try:
            while self._watch(dict(poller.poll())):
                pass
        except zmq.ContextTerminated:
            logger.debug("the context ended before its gate was closed")
        finally:
            self._events.close(linger=0)
            if self._authenticator:
                self._authenticator.requests.close()

    def _watch(self, ready: dict[object, int]) -> bool:
        """Handle the ready sockets; False where the monitor has stopped."""
        if self._authenticator and self._authenticator.requests in ready:
            self._authenticator.answer()
        if self._events not in ready:
            return True
        event = zmq.Event(parse_monitor_message(self._events.recv_multipart())["event"])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        self.failed_handshakes += 1
        self._warnings.say(FAILED[event])
        return True


class _Authenticator:
    """Answers the authentication requests of a context: whether a key is in the list."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Path) -> None:
        self._allowed = allowed
        self._warnings = Throttled(logger, "no client is accepted")
        self.requests = context.socket(zmq.REP)
        self.requests.linger = 0
        try:
            self.requests.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self.requests.close()
            raise UnavailableError("a ZeroMQ context can have one listening socket with keys: make another") from error

    def answer(self) -> None:
        version, sequence, _domain, _address, _identity, _mechanism, *credentials = self.requests.recv_multipart()
        status = b"200" if self._accepts(credentials) else b"400"
        self.requests.send_multipart([version, sequence, status, b"", b"", b""])

    def _accepts(self, credentials: list[bytes]) -> bool:
        try:
            return len(credentials) == 1 and z85.encode(credentials[0]) in allowed_keys(self._allowed)
        except ConfigError as error:
            self._warnings.say(error)
            return False
