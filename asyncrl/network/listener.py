"""Opens listening sockets. Each has a gate, which accepts clients whose keys are in a list and counts failed
handshakes.

The gate answers libzmq's authentication requests (ZAP, RFC 27). A handshake fails if the client does not speak ZeroMQ,
or has no keys, or has keys for another server, or has a key that is not in the list.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.machine.ports import who_listens
from asyncrl.network.keys import ServerKeys, allowed_keys
from asyncrl.network.throttle import Throttled

logger = logging.getLogger(__name__)

DOMAIN = b"asyncrl"
PEER_MESSAGES = 64
"""The maximum number of messages that wait to be sent to one peer. Up to this many more may wait to be read from the
peer. Clients of this package have at most half as many unanswered requests, since ZeroMQ reports room in a full queue
only after half of it was read. A peer that reads slowly takes up no more memory than these messages: it loses further
replies, and repeats its requests."""
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not in the list of allowed clients",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has no keys or keys of another run, or does not speak ZeroMQ",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it left in the handshake; it may have no keys",
}


class Listener:
    """A listening socket with its gate, which runs in its own thread until `close`.

    - `socket`: a ROUTER that is bound to `endpoint`. A message to an unknown client raises ZMQError.
    - `keys`: if None, every client is accepted. A context can have only one listener with keys.
    - `max_message_bytes`: a peer that sends a larger frame is cut off.

    Raises UnavailableError: the address is taken or not this machine's.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ServerKeys | None,
        max_message_bytes: int,
    ) -> None:
        self.failed_handshakes = 0
        self._keys = keys
        self._refusals = Throttled(logger, "a client was refused")
        self._damage = Throttled(logger, "no client is accepted")
        self._requests = context.socket(zmq.REP)
        self.socket = socket = context.socket(zmq.ROUTER)
        self._events = socket.get_monitor_socket(sum(FAILED) | zmq.EVENT_MONITOR_STOPPED)
        self._requests.linger = socket.linger = 0
        socket.router_mandatory = True
        socket.sndhwm = socket.rcvhwm = PEER_MESSAGES
        socket.maxmsgsize = max_message_bytes
        try:
            if keys is not None:
                require_keys(socket, keys)
                self._answer_requests()
            socket.bind(endpoint)
        except (zmq.ZMQError, UnavailableError) as error:
            socket.disable_monitor()
            self._close_gate()
            socket.close()
            raise UnavailableError(f"cannot listen at {endpoint}: {error}{_holder(endpoint, error)}") from error
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._guard, name="network-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.socket.disable_monitor()
        self._thread.join()
        self.socket.close()

    def _answer_requests(self) -> None:
        try:
            self._requests.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            raise UnavailableError("a ZeroMQ context can have one listening socket with keys: make another") from error

    def _close_gate(self) -> None:
        with suppress(zmq.ZMQError):  # raised after the end of the context
            if self._requests.last_endpoint:
                # ZeroMQ closes the socket later. Until then the next gate of the context could not bind the address.
                self._requests.unbind(ZAP_ENDPOINT)
        self._events.close(linger=0)
        self._requests.close()

    def _guard(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._requests, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._requests in ready:
                    version, sequence, _domain, _address, _identity, _mechanism, *rest = self._requests.recv_multipart()
                    status = b"200" if self._accepts(rest) else b"400"
                    self._requests.send_multipart([version, sequence, status, b"", b"", b""])
                if self._events in ready:
                    event = zmq.Event(parse_monitor_message(self._events.recv_multipart())["event"])
                    if event == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self.failed_handshakes += 1
                    self._refusals.say(FAILED[event])
        except zmq.ContextTerminated:
            logger.debug("the context ended before its listener was closed")
        finally:
            self._close_gate()

    def _accepts(self, credentials: list[bytes]) -> bool:
        try:
            allowed = allowed_keys(self._keys.allowed) if self._keys else ()
            return len(credentials) == 1 and z85.encode(credentials[0]) in allowed
        except ConfigError as error:
            self._damage.say(error)
            return False


def _holder(endpoint: str, error: Exception) -> str:
    """Return a text that names the process that listens at `endpoint`, or "" if the error has another reason."""
    port = endpoint.rpartition(":")[2]
    is_taken = isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE
    return who_listens(int(port)) if is_taken and port.isdecimal() else ""


def require_keys(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Encrypt the connections of a listening socket, and refuse clients that no gate accepts."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    # Without these two settings, ZeroMQ accepts every client with the server's public key if no gate answers.
    socket.zap_domain = DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
