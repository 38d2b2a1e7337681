"""The gate of a listening socket: lets in the clients whose keys are in a list, and counts everybody else.

It answers libzmq's authentication requests (ZAP, RFC 27) and watches for handshakes that failed: no keys, keys for
another server, keys that are not in the list, or no ZeroMQ at all.
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
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it went away in the handshake; it may have no keys",
}


class Gate:
    """Stands before `socket`, which is not bound yet, in a thread of its own until `close`.

    With `allowed` the list decides; a context has one such gate. Without, everyone is let in.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], allowed: Path | None
    ) -> None:
        self.strangers = 0
        self._socket = socket
        self._warnings = Throttled(logger, "a stranger was turned away")
        self._porter = None if allowed is None else _Porter(context, allowed)
        self._events = socket.get_monitor_socket(sum(FAILED) | zmq.EVENT_MONITOR_STOPPED)
        self._thread = threading.Thread(target=self._run, name="network-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more. The socket is still open."""
        self._socket.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        if self._porter:
            poller.register(self._porter.requests, zmq.POLLIN)
        try:
            while self._watch(dict(poller.poll())):
                pass
        except zmq.ContextTerminated:
            logger.debug("the context ended before its gate was closed")
        finally:
            self._events.close(linger=0)
            if self._porter:
                self._porter.requests.close()

    def _watch(self, ready: dict[object, int]) -> bool:
        """Take what is ready; False where the monitor has stopped."""
        if self._porter and self._porter.requests in ready:
            self._porter.answer()
        if self._events not in ready:
            return True
        event = zmq.Event(parse_monitor_message(self._events.recv_multipart())["event"])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        self.strangers += 1
        self._warnings.say(FAILED[event])
        return True


class _Porter:
    """Answers the authentication requests of a context: is this key in the list?"""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Path) -> None:
        self._allowed = allowed
        self._warnings = Throttled(logger, "nobody is let in")
        self.requests = context.socket(zmq.REP)
        self.requests.linger = 0
        try:
            self.requests.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self.requests.close()
            raise UnavailableError("a ZeroMQ context can have one listening socket with keys: make another") from error

    def answer(self) -> None:
        version, sequence, _domain, _address, _identity, _mechanism, *credentials = self.requests.recv_multipart()
        status = b"200" if self._lets_in(credentials) else b"400"
        self.requests.send_multipart([version, sequence, status, b"", b"", b""])

    def _lets_in(self, credentials: list[bytes]) -> bool:
        try:
            return len(credentials) == 1 and z85.encode(credentials[0]) in allowed_keys(self._allowed)
        except ConfigError as error:
            self._warnings.say(error)
            return False
