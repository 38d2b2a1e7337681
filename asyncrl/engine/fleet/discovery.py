"""Finds the urls of servers: in the configuration, in a file that may change, or at an SGLang router."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.errors import EngineError
from asyncrl.network.throttle import ErrorLogger

logger = logging.getLogger(__name__)

ROUTER_S = 10.0
_NO_CHANGE = "no server is added or removed"

Discovery = Callable[[], Awaitable[Sequence[str] | None]]
"""A function that returns the urls of the servers, or None if the urls are unknown at the moment."""


def listed(urls: Sequence[str]) -> Discovery:
    """Always discover the same `urls`."""

    async def discover() -> Sequence[str]:
        return urls

    return discover


def in_file(path: Path) -> Discovery:
    """Discover the urls in the lines of a file. Empty lines and lines that begin with # are ignored.

    Two reads in a row must find the same urls, because a file that is being written may be empty, or end within a url.
    """
    error_logger = ErrorLogger(logger)

    async def look() -> Sequence[str] | None:
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            error_logger.exception(f"cannot read the list of servers; {_NO_CHANGE}: {error}", error, traced=False)
            return None
        return [line for line in lines if line and not line.startswith("#")]

    return _settled(look)


def behind_router(url: str) -> Discovery:
    """Discover the workers of an SGLang router. Requests go to them directly, since each has its own version of the
    weights.

    Two answers in a row must agree, and an empty list does not count: a router that has just started adds its workers
    one after another, once it has reached them.
    """
    error_logger = ErrorLogger(logger)

    async def look() -> Sequence[str] | None:
        http = Http(url)
        try:
            return sorted(await _workers(http)) or None
        except EngineError as error:
            error_logger.exception(f"the router does not name its servers; {_NO_CHANGE}: {error}", error, traced=False)
            return None
        finally:
            await http.close()

    return _settled(look)


async def _workers(http: Http) -> list[str]:
    """Ask a router for its workers. Newer routers answer {"workers": [{"url": ...}]}, older routers {"urls": [...]}."""
    try:
        answer = await http.get("/workers", ROUTER_S)
    except ServerRefusedError:
        answer = await http.get("/list_workers", ROUTER_S)
    match answer:
        case {"workers": list(workers)} if all(isinstance(worker, dict) and "url" in worker for worker in workers):
            return [str(worker["url"]) for worker in workers]
        case {"urls": list(urls)}:
            return [str(url) for url in urls]
    raise EngineError(f"it answered {str(answer)[:200]} instead of a list of workers")


def _settled(look: Discovery) -> Discovery:
    """Discover the urls once `look` has found the same ones twice in a row."""
    last: Sequence[str] | None = None

    async def discover() -> Sequence[str] | None:
        nonlocal last
        before, last = last, await look()
        return last if last == before else None

    return discover
