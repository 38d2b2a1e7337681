"""The urls of the servers: from the configuration, from a file that may change, or from an SGLang router."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.errors import EngineError

logger = logging.getLogger(__name__)

ROUTER_S = 10.0

Discovery = Callable[[], Awaitable[Sequence[str] | None]]
"""The urls of the servers now, or None where they are unknown at the moment."""


def listed(urls: Sequence[str]) -> Discovery:
    """Always `urls`."""

    async def discover() -> Sequence[str]:
        return urls

    return discover


def in_file(path: Path) -> Discovery:
    """The lines of a file without empty ones and comments, which begin with #.

    Two reads in a row must agree: a file that is just being written may look empty, or end in half a url.
    """

    async def look() -> Sequence[str] | None:
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("cannot read the list of servers, which stays as it was: %s", error)
            return None
        return [line for line in lines if line and not line.startswith("#")]

    return _settled(look)


def behind_router(url: str) -> Discovery:
    """The workers that an SGLang router names. Requests go to them directly, since versions belong to a server.

    Two answers in a row must agree, and an empty list does not count: a router that has just started adds its workers
    one after another, once it has reached them.
    """

    async def look() -> Sequence[str] | None:
        http = Http(url)
        try:
            return sorted(await _workers(http)) or None
        except EngineError as error:
            logger.warning("the router does not name its servers, which stay as they were: %s", error)
            return None
        finally:
            await http.close()

    return _settled(look)


async def _workers(http: Http) -> list[str]:
    """Newer routers answer {"workers": [{"url": ...}]}, older ones {"urls": [...]}."""
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
    """The urls, once `look` has found the same ones twice in a row."""
    last: Sequence[str] | None = None

    async def discover() -> Sequence[str] | None:
        nonlocal last
        before, last = last, await look()
        return last if last == before else None

    return discover
