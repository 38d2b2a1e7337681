"""Strangers at the endpoint of metrics, over real sockets."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncrl.machine.ports import LOOPBACK
from asyncrl.observe.sinks.scraping import MAX_CONNECTIONS, ScrapedServer, serve_metrics
from tests.helpers import GENEROUS_S, until


def app(environ: Any, start_response: Callable[..., Any]) -> list[bytes]:
    if environ["PATH_INFO"] == "/fault":
        raise ValueError("y" * 5000)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"metrics"]


@pytest.fixture
def server() -> Iterator[ScrapedServer]:
    served, thread = serve_metrics(LOOPBACK, app)
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def scrape(server: ScrapedServer) -> bytes:
    address = f"http://{LOOPBACK}:{server.server_port}/metrics"
    with urllib.request.urlopen(address, timeout=GENEROUS_S) as answer:
        return bytes(answer.read())


def connect(server: ScrapedServer, sent: bytes) -> socket.socket:
    stranger = socket.create_connection((LOOPBACK, server.server_port), timeout=GENEROUS_S)
    stranger.sendall(sent)
    return stranger


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: "])
def test_strangers_keep_prometheus_from_no_scrape_and_take_no_more_threads(server: ScrapedServer, sent: bytes) -> None:
    strangers = [connect(server, sent) for _ in range(5 * MAX_CONNECTIONS)]
    assert scrape(server) == b"metrics"
    assert server.connections <= MAX_CONNECTIONS
    assert strangers[0].recv(1) == b""
    for each in strangers:
        each.close()
    until(lambda: server.connections == 0)
    assert scrape(server) == b"metrics"


@pytest.mark.slow
def test_what_goes_wrong_on_connections_is_logged_at_a_bounded_rate(
    server: ScrapedServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            for sent in (b"\0\x1b[31m" + b"x" * 100 + b"\r\n\r\n", b"GET /fault HTTP/1.0\r\n\r\n"):
                stranger = connect(server, sent)
                while stranger.recv(1 << 16):
                    continue
                stranger.close()
    assert len(caplog.records) < 40
    assert all(len(line) < 1000 and line.isprintable() for line in caplog.messages)
    assert capfd.readouterr().err == ""
