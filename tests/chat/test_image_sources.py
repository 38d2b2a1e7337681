from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.chat.image_blocks import image_blocks
from asyncrl.chat.image_sources import fetch_public, read_source
from asyncrl.config.schema import ImagesConfig
from asyncrl.errors import RefusedError
from asyncrl.network.public import Connect, public_connector
from tests.network.web import Handler, Names, to_loopback, web_server

PICTURE = b"the bytes of a picture"


def read(source: Any, fetch: Any = None, **config: Any) -> bytes:
    return asyncio.run(read_source({"type": "image", "image": source}, ImagesConfig(**config), fetch))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "one.png").write_bytes(PICTURE)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "fine").symlink_to(folder / "inner" / "one.png")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    "source",
    [
        PICTURE,
        {"bytes": PICTURE, "path": "anything.png"},
        "data:image/png;base64," + base64.b64encode(PICTURE).decode(),
    ],
)
def test_bytes_in_the_message_need_no_permission(source: Any):
    assert read(source) == PICTURE


def test_the_blocks_of_the_chat_completions_api_are_read_too():
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    block = {"type": "image_url", "image_url": {"url": url}}
    assert asyncio.run(read_source(block, ImagesConfig())) == PICTURE
    text = {"type": "text", "text": "What is this?"}
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [text, block]}]
    assert image_blocks(messages) == [block]


def test_a_path_is_read_within_the_permitted_folders_only(folder: Path):
    folders = [str(folder.parent / "missing"), str(folder)]
    for path in (
        "inner/one.png",
        str(folder / "inner" / "one.png"),
        "fine",
        f"file://{folder}/fine",
        "./inner/../fine",
    ):
        assert read(path, folders=folders) == PICTURE
        assert read({"path": path}, folders=folders) == PICTURE
        with pytest.raises(RefusedError, match=r"data\.images\.folders"):
            read(path)
    for path in ("../secret", str(folder.parent / "secret"), "link", "missing.png", "a\0b", "/etc/passwd", ""):
        with pytest.raises(RefusedError, match=r"data\.images\.folders|neither bytes|regular file|cannot be read"):
            read(path, folders=folders)
    for path in ("pipe", "inner", "."):
        with pytest.raises(RefusedError, match=r"not a regular file|cannot be read"):
            read(path, folders=folders)


def test_nothing_larger_than_the_limit_is_read(folder: Path):
    (folder / "large").write_bytes(bytes(3 << 20))
    with pytest.raises(RefusedError, match="not a regular file of at most 2097152 bytes"):
        read("large", folders=[str(folder)], max_mb=2)
    with pytest.raises(RefusedError, match=r"data\.images\.max_mb=2"):
        read(bytes(3 << 20), max_mb=2)


@pytest.mark.parametrize("source", [None, 5, {}, {"bytes": None, "path": None}, ["x"]])
def test_a_block_that_names_no_image_is_refused(source: Any):
    with pytest.raises(RefusedError, match="neither bytes, nor a path, nor a URL"):
        read(source)


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:;base64,%%%"])
def test_a_data_url_that_cannot_be_decoded_is_refused(url: str):
    with pytest.raises(RefusedError, match="data: URL"):
        read(url)


def test_urls_are_fetched_only_where_they_are_allowed():
    asked: list[tuple[str, int]] = []

    async def fetch(url: str, limit: int) -> bytes:
        asked.append((url, limit))
        return PICTURE

    with pytest.raises(RefusedError, match=r"set data\.images\.urls=true to fetch it"):
        read("https://example.org/a.png", fetch)
    assert not asked
    assert read("https://example.org/a.png", fetch, urls=True, max_mb=1) == PICTURE
    assert asked == [("https://example.org/a.png", 1 << 20)]
    # Other schemes are names of files, of which none is permitted.
    with pytest.raises(RefusedError, match=r"data\.images\.folders"):
        read("ftp://example.org/a.png", fetch, urls=True)


def test_a_url_that_cannot_be_read_is_refused():
    for url in ("http://[bad", "https://[::1", "http://x:99999/a.png", "data:;base64,é"):
        with pytest.raises(RefusedError, match=r"cannot be fetched|damaged"):
            read(url, urls=True)


async def served(handler: Handler, limit: int, connect: Connect = to_loopback) -> bytes:
    """Fetch an image from a real server."""
    async with web_server(handler) as port:
        return await fetch_public(f"http://pictures.example:{port}/a.png", limit, connect)


async def answer(request: web.Request) -> web.StreamResponse:
    return web.Response(body=PICTURE)


async def redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/other")


async def broken(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


def test_a_name_that_leads_to_a_private_address_is_refused_before_anything_is_sent():
    requests = []

    async def note(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await answer(request)

    with pytest.raises(RefusedError, match=r"127\.0\.0\.1, which is not a public address"):
        asyncio.run(served(note, 100, lambda: public_connector(Names())))
    assert not requests


def test_what_a_public_address_serves_is_read_up_to_the_limit():
    assert asyncio.run(served(answer, 100)) == PICTURE
    with pytest.raises(RefusedError, match=r"an image of a message: .*status 302"):
        asyncio.run(served(redirect, 100))
    with pytest.raises(RefusedError, match="more than 3 bytes"):
        asyncio.run(served(answer, 3))
    with pytest.raises(RefusedError, match="status 500"):
        asyncio.run(served(broken, 100))
    with pytest.raises(RefusedError, match="cannot be fetched"):
        asyncio.run(fetch_public("http://pictures.example:1/a.png", 100, to_loopback))
