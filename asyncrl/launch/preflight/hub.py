"""Checks quickly if the Hugging Face hub can be reached. Its own client retries for half a minute or longer."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from asyncrl.text import message_of

log = logging.getLogger("asyncrl.train")

PATIENCE_S = 2.0
ANSWER_S = 10.0
"""The seconds that one request waits for an answer of the hub. On a slow link an answer may take almost this long."""
PORTS = {"https": 443, "http": 80, "socks5": 1080, "socks5h": 1080}


def unreachable(patience_s: float = PATIENCE_S) -> str | None:
    """Return the reason why the hub, or the proxy to it, cannot be reached. Return None if it can be reached, or if
    HF_HUB_OFFLINE forbids asking it. If there was no answer within `patience_s` seconds, log that and return None."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    place = _first_hop(urlsplit(constants.ENDPOINT))
    host, port = place.hostname or "", place.port or PORTS.get(place.scheme, PORTS["http"])
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # Resolving a name may take long, and cannot be interrupted.
    threading.Thread(target=lambda: answers.put(connection_error(host, port)), daemon=True).start()
    try:
        reason = answers.get(timeout=patience_s)
    except queue.Empty:
        log.warning(
            "nothing has answered at %s:%d for %g s; the start keeps trying, perhaps for over a minute. Ctrl-C ends "
            "it, and HF_HUB_OFFLINE=1 never asks the hub",
            *(host, port, patience_s),
        )
        return None
    return reason and f"nothing answers at {host}:{port} ({reason})"


def no_answer(url: str, patience_s: float = ANSWER_S) -> str | None:
    """Return the reason why one request to `url`, which is not retried, got no answer within `patience_s` seconds. None
    if the hub has answered, even by a refusal."""
    from huggingface_hub import get_session

    try:
        get_session().head(url, timeout=patience_s)
    except Exception as error:  # noqa: BLE001 - the class depends on the version of huggingface_hub
        return message_of(error)
    return None


def _first_hop(endpoint: SplitResult) -> SplitResult:
    """Return the proxy on the way to the endpoint, or the endpoint itself if the environment names no proxy."""
    proxies = getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(endpoint.netloc):
        return endpoint
    return urlsplit(proxy if "//" in proxy else f"http://{proxy}")


def connection_error(host: str, port: int, timeout_s: float | None = None) -> str | None:
    """Return the reason why nothing accepts connections at this address, or None if something does."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
