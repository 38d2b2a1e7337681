"""Real web servers on loopback, and names that lead to them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Names(AbstractResolver):
    """Resolves every name to one address, and notes the names."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Any:
        self.asked.append(host)
        kind = {"family": socket.AF_INET, "proto": 0, "flags": socket.AI_NUMERICHOST}
        return [{"hostname": host, "host": self._address, "port": port, **kind}]

    async def close(self) -> None:
        return None


def to_loopback() -> aiohttp.TCPConnector:
    """Connections without the check of addresses, to names that all are servers of the test."""
    return aiohttp.TCPConnector(resolver=Names())


@asynccontextmanager
async def web_server(handler: Handler) -> AsyncIterator[int]:
    """A server whose every path is answered by `handler`; its port."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
