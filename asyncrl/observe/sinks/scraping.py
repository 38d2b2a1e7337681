"""Runs the server from which Prometheus reads the metrics of a role.

The server needs no key: every client that reaches it may connect. At most MAX_CONNECTIONS connections are open. A
further one closes the oldest, so that idle connections neither block a scrape nor take more threads. Errors are logged
at a bounded rate.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from asyncrl.network.throttle import Throttled
from asyncrl.text import reason_of

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
READING_S = 10.0
"""A connection is closed if it is idle for this number of seconds."""


class ScrapedServer(WSGIServer):
    """A server with a thread for each connection."""

    # The connections that may wait. socketserver's default, 5, is often reached, and then Prometheus waits for seconds.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        """The open connections, the oldest first."""
        self._faults = Throttled(logger, "a request for metrics failed")
        super().__init__(address, handler)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):  # its client has closed it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        threading.Thread(target=self._serve, args=(request, client_address), daemon=True).start()

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception as error:  # noqa: BLE001 - it is logged
            self.note(error)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def note(self, error: Exception) -> None:
        """Log an error. If errors are frequent, only count it."""
        with self._lock:
            self._faults.say(reason_of(error))


class _Handler(WSGIRequestHandler):
    timeout = READING_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are too frequent."""


def serve_metrics(host: str, app: Callable[..., Any]) -> tuple[ScrapedServer, threading.Thread]:
    """Serve `app` at a free port from now on, in a thread. Raises OSError: `host` is not an address of this machine."""

    def contained(environ: Any, start_response: Callable[..., Any]) -> Any:
        try:
            return app(environ, start_response)
        except Exception as error:  # noqa: BLE001 - it is logged; wsgiref would print a traceback each time
            server.note(error)
            start_response("500 Internal Server Error", [])
            return [b""]

    server = make_server(host, 0, contained, ScrapedServer, _Handler)
    thread = threading.Thread(target=server.serve_forever, name="prometheus", daemon=True)
    thread.start()
    return server, thread
