"""A proxy in the environment does not stand between an agent and the endpoint of its own actor."""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest

from asyncrl.network.proxies import EXCEPTIONS, PROXIES, reach_directly


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_a_client_reaches_loopback_though_the_environment_names_a_dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as dead, HTTPServer(("127.0.0.1", 0), Hello) as server:
        dead.bind(("127.0.0.1", 0))  # It does not listen.
        environment = {"HTTP_PROXY": f"http://127.0.0.1:{dead.getsockname()[1]}", "NO_PROXY": "example.com"}
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        reach_directly((), environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert httpx.get(url).text == "hello"
        server.shutdown()


def test_hosts_are_added_once_to_those_that_were_exceptions_before() -> None:
    environment = {"https_proxy": "http://proxy:3128", "no_proxy": "a.com, localhost", "NO_PROXY": "b.com"}
    for _ in range(2):
        reach_directly(["10.0.0.1"], environment)
        hosts = "a.com,localhost,b.com,127.0.0.1,::1,10.0.0.1"
        assert environment == {"https_proxy": "http://proxy:3128", "no_proxy": hosts, "NO_PROXY": hosts}


@pytest.mark.parametrize("environment", [{}, {"HTTP_PROXY": ""}])
def test_an_environment_without_a_proxy_stays_as_it_is(environment: dict[str, str]) -> None:
    before = dict(environment)
    reach_directly(["10.0.0.1"], environment)
    assert environment == before
