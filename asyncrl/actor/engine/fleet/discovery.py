"""Which servers there are: named in the configuration, in a file that may change, or known to an SGLang router."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.actor.engine.fleet.http import Http, ServerRefusedError
from asyncrl.errors import EngineError

logger = logging.getLogger(__name__)

ROUTER_S = 10.0

Discovery = Callable[[], Awaitable[Sequence[str] | None]]
"""The urls of the servers now, or None where that cannot be told just now."""


def listed(urls: Sequence[str]) -> Discovery:
    """Always `urls`."""

    async def discover() -> Sequence[str] | None:
        return urls

    return discover


def settled(look: Discovery) -> Discovery:
    """What two looks in a row have found."""
    found: Sequence[str] | None = None

    async def discover() -> Sequence[str] | None:
        nonlocal found
        before, found = found, await look()
        return found if found == before else None

    return discover


def in_file(path: Path) -> Discovery:
    """The lines of a file; empty ones and those that begin with # do not count. They must be settled: a file that is
    just being written may look empty, or end in half a url."""

    async def look() -> Sequence[str] | None:
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("the list of servers cannot be read, so it stays as it was: %s", error)
            return None
        return [line for line in lines if line and not line.startswith("#")]

    return settled(look)


def behind_router(url: str) -> Discovery:
    """The workers that an SGLang router names. Requests go to them directly, since versions belong to a server.

    They must be settled: a router that has just started adds its workers one after another, once it has seen that they
    are there. So one that names none is not believed at all.
    """

    async def look() -> Sequence[str] | None:
        http = Http(url)
        try:
            urls = _urls(await _workers(http))
        except (EngineError, ValueError, LookupError, TypeError) as error:
            logger.warning("the router does not tell its servers, so they stay as they were: %s", error)
            return None
        finally:
            await http.close()
        if not urls:
            logger.warning("the router at %s names no servers, so they stay as they were", url)
        return sorted(urls) or None

    return settled(look)


async def _workers(http: Http) -> Any:
    try:
        return await http.get("/workers", ROUTER_S)
    except ServerRefusedError:
        return await http.get("/list_workers", ROUTER_S)


def _urls(answer: Any) -> list[str]:
    """Newer routers answer {"workers": [{"url": ...}]}, older ones {"urls": [...]}."""
    match answer:
        case {"workers": list(workers)}:
            return [str(worker["url"]) for worker in workers]
        case {"urls": list(urls)}:
            return [str(url) for url in urls]
    raise ValueError(f"a router names its workers, not {str(answer)[:200]}")
