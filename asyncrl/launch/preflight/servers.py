"""Warns of servers that the configuration names, and that do not answer when the run starts.

They may start later, so this is not an error: an actor waits for its servers. But without them no episode starts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from asyncrl.config.schema import EngineConfig
from asyncrl.launch.preflight.hub import PATIENCE_S, PORTS, connection_error

log = logging.getLogger("asyncrl.train")

MOST_ASKED = 32
"""The number of servers that are asked at once."""


def warn_of_silent_servers(engine: EngineConfig, patience_s: float = PATIENCE_S) -> None:
    """Log a warning for each server of `engine.urls`, and for `engine.router`, that accepts no connection within
    `patience_s` seconds."""
    named = [("engine.urls", url) for url in engine.urls]
    named += [("engine.router", engine.router)] if engine.router else []
    if engine.kind == "embedded" or not named:
        return
    with ThreadPoolExecutor(MOST_ASKED) as pool:
        reasons = pool.map(lambda each: _silence(each[1], patience_s), named)
        for (key, url), reason in zip(named, reasons, strict=True):
            if reason is not None:
                log.warning("%s: no server answers at %s yet (%s); %s", key, url, reason, _effect(engine.urls))


def _silence(url: str, patience_s: float) -> str | None:
    place = urlsplit(url)
    try:
        port = place.port or PORTS.get(place.scheme, PORTS["http"])
    except ValueError as error:
        return str(error)
    return connection_error(place.hostname or "", port, patience_s)


def _effect(urls: Sequence[str]) -> str:
    alone = "no episode starts before it does" if len(urls) < 2 else "episodes start on the others only"
    return f"the run waits for it, and {alone}"
