"""Reads the images of messages: from bytes in the message, from files of permitted folders, or from public addresses.

An image block (`image_blocks`) has a source: the bytes of a file, a struct with `bytes` or `path` as Hugging Face
datasets write it, a `data:` URL, a path, or an http or https URL.

Tasks are untrusted. So a path must be within one of `data.images.folders` after links are resolved. A URL is fetched
only with `data.images.urls`, only from public addresses (`network.public`), and without redirections. Nothing larger
than `data.images.max_mb` is read.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ImagesConfig
from asyncrl.errors import RefusedError, UnavailableError
from asyncrl.network.public import Connect, get_public, public_connector

FETCH_S = 20.0

Fetch = Callable[[str, int], Awaitable[bytes]]
"""A function that gets a URL and the largest allowed number of bytes, and returns the file. It raises RefusedError if
the file cannot be fetched or is too large."""


async def read_source(block: Mapping[str, Any], config: ImagesConfig, fetch: Fetch | None = None) -> bytes:
    """Read the file that an image block names. `fetch` downloads URLs, by default `fetch_public`.

    Raises RefusedError: the block names no file, or its file is not permitted, cannot be read or is too large.
    """
    limit = int(config.max_mb * 2**20)
    source = _source(block)
    if isinstance(source, str):
        scheme = source.partition(":")[0].lower() if ":" in source else ""
        if scheme == "data":
            source = await asyncio.to_thread(_decoded, source)
        elif scheme in ("http", "https"):
            if not config.urls:
                raise RefusedError(f"a message names the image {source!r:.100}: set data.images.urls=true to fetch it")
            source = await (fetch or fetch_public)(source, limit)
        else:
            path = source.removeprefix("file://")
            source = await asyncio.to_thread(read_permitted, path, config.folders, limit)
    if len(source) > limit:
        raise RefusedError(f"an image has {len(source)} bytes; data.images.max_mb={config.max_mb:g} allows fewer")
    return source


def _source(block: Mapping[str, Any]) -> bytes | str:
    found = block.get("image", block.get("image_url"))
    if isinstance(found, Mapping):
        found = next((found[name] for name in ("bytes", "url", "path") if found.get(name)), None)
    if not isinstance(found, (str, bytes)):
        raise RefusedError(f"an image of a message is neither bytes, nor a path, nor a URL: {sorted(block)}")
    return found


def named_url(block: Mapping[str, Any]) -> str | None:
    """The http or https URL of an image block. None if the block has bytes or a path, or is empty."""
    with suppress(RefusedError):
        source = _source(block)
        if isinstance(source, str) and source.partition(":")[0].lower() in ("http", "https"):
            return source
    return None


def _decoded(url: str) -> bytes:
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise RefusedError(f"an image in a message is a data: URL without base64: {head!r:.60}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(f"an image in a message is a damaged data: URL: {error}") from error


def read_permitted(path: str, folders: Sequence[str], limit: int) -> bytes:
    """Read a file within one of `folders`. A relative path is tried in each folder, in order.

    Raises RefusedError: the file is not in these folders, is not regular, exceeds `limit` bytes, or cannot be read.
    """
    for folder in folders:
        try:
            root = Path(folder).resolve(strict=True)
            file = (root / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            continue
        if file.is_relative_to(root):
            return _read(file, path, limit)
    raise RefusedError(f"a message names the image {path!r:.200}, which is in no folder of data.images.folders")


def _read(file: Path, path: str, limit: int) -> bytes:
    try:
        # Without these flags, opening a pipe would block, and a link that was made after the check could lead to
        # another file.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > limit:
                raise RefusedError(f"the image {path!r:.200} is not a regular file of at most {limit} bytes")
            return opened.read(limit + 1)
    except OSError as error:
        raise RefusedError(f"the image {path!r:.200} cannot be read: {error}") from error


async def fetch_public(url: str, limit: int, connect: Connect = public_connector) -> bytes:
    """Fetch a URL on the public internet.

    Raises RefusedError: the URL's address is not public, the server redirects, the file exceeds `limit` bytes, or it
    cannot be fetched.
    """
    try:
        return (await get_public(url, limit, FETCH_S, connect=connect)).body
    except (RefusedError, UnavailableError) as error:
        raise RefusedError(f"an image of a message: {error}") from error
