"""The tool `fetch`: gets the text of web pages from the hosts that `actor.fetch.hosts` allows, without a browser.

Requests and redirections go only to public addresses of allowed hosts (`network.public`). If a URL is wrong or not
allowed, the policy reads the reason. If a server fails, the tool has failed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from yarl import URL

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.network.public import Connect, get_public, public_connector
from asyncrl.tools.base import Tool, ToolRefusal
from asyncrl.tools.page_text import page_text

AT_ONCE = 16
"""The maximum number of pages that the episodes of one actor fetch at the same time."""

THREADS = 2
REDIRECTIONS = 5
LONGEST_URL = 2000
NOTE_CHARS = 80
"""The number of characters that are reserved for the note on the parts of a page."""

_ENTRY = re.compile(r"(\*\.)?([^\s/:@*?#\[\]]+|\[[0-9a-fA-F:.]+\])(?::([0-9]{1,5}))?")


class AllowedHosts:
    """The hosts of `actor.fetch.hosts`: `HOST`, or `*.HOST` for all subdomains of HOST, with or without `:PORT`.

    Without a port, the default ports of http and https are allowed. Raises ConfigError: there is no entry, or an entry
    is malformed.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        if not entries:
            raise ConfigError("actor.tools: fetch needs the hosts that it may reach: actor.fetch.hosts=[HOST, ...]")
        self._entries = [_read_entry(entry) for entry in entries]
        self.shown = f"{', '.join(entries):.500}"

    def check(self, url: URL) -> None:
        """Raises RefusedError: the host or the port of the URL is not allowed."""
        host = (url.raw_host or "").rstrip(".")
        for below, name, port in self._entries:
            is_named = host.endswith(f".{name}") if below else host == name
            if is_named and (url.is_default_port() if port is None else url.port == port):
                return
        at = f"{url.host}:{url.explicit_port}" if url.explicit_port else url.host
        raise RefusedError(f"{at} is not allowed; the allowed hosts are {self.shown}")


def _read_entry(entry: str) -> tuple[bool, str, int | None]:
    """Read an entry: whether it begins with `*.`, the host's name, and the port. `None`: the default ports."""
    found = _ENTRY.fullmatch(entry)
    try:
        host = URL.build(scheme="http", host=found[2].strip("[]").rstrip(".")).raw_host if found else None
    except ValueError:
        host = None
    if found is None or host is None:
        raise ConfigError(
            f"actor.fetch.hosts: {entry!r} is not a host; write HOST, *.HOST or HOST:PORT, without http://"
        )
    return bool(found[1]), host, int(found[3]) if found[3] else None


class PageReader:
    """Reads the texts of pages for the episodes of one actor.

    A page may take `timeout_s` seconds and have `max_bytes` bytes. `connect` makes the connector of the HTTP client.
    """

    def __init__(
        self, hosts: AllowedHosts, max_bytes: int, timeout_s: float, connect: Connect = public_connector
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._connect = connect
        self._free = asyncio.Semaphore(AT_ONCE)
        # The reader has threads of its own: a page that takes long to parse must not occupy threads that others need.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="page")

    async def read(self, url: str) -> str:
        """Fetch a page and return its text.

        Raises RefusedError: the URL is not allowed, or its page has no text; UnavailableError: the server failed.
        """
        limits = self._max_bytes, self._timeout_s, REDIRECTIONS
        async with self._free:
            fetched = await get_public(url, *limits, self._hosts.check, self._connect)
        return await asyncio.get_running_loop().run_in_executor(self._threads, page_text, fetched)


class FetchPage(Tool):
    """Fetches pages, and returns a long one in parts. The last page is kept, so that all its parts come from the same
    text."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "fetch",
        "description": "Gets a web page as plain text.",
        "parameters": {
            "type": "object",
            "properties": {
                "url": {"type": "string", "description": "the address of the page, such as https://example.org/page"},
                "part": {"type": "integer", "description": "which part of a long page, from 1; 1 if left out"},
            },
            "required": ["url"],
        },
    }
    reader: ClassVar[PageReader]
    part_chars: ClassVar[int]

    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        if importlib.util.find_spec("lxml") is None:
            raise ConfigError("actor.tools: fetch needs the extra: pip install 'asyncrl[fetch]'")
        hosts, max_bytes = AllowedHosts(actor.fetch.hosts), int(actor.fetch.max_mb * 2**20)
        reader = PageReader(hosts, max_bytes, actor.tool_timeout_s)
        part_chars = max(1, actor.max_tool_chars - NOTE_CHARS)
        schema = {**cls.schema, "description": f"{cls.schema['description']} Allowed hosts: {hosts.shown}."}
        return type(cls.__name__, (cls,), {"reader": reader, "part_chars": part_chars, "schema": schema})

    async def create(self, **kwargs: Any) -> None:
        self._page: tuple[str, str] | None = None

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        url, part = arguments["url"].strip(), arguments.get("part", 1)
        text = await self._text(url)
        parts = max(1, -(-len(text) // self.part_chars))
        if not 1 <= part <= parts:
            raise ToolRefusal(f"Error: the page has the parts 1 to {parts}.")
        shown = text[(part - 1) * self.part_chars : part * self.part_chars]
        return shown if parts == 1 else f"{shown}\n(part {part} of {parts})"

    async def _text(self, url: str) -> str:
        if self._page is not None and self._page[0] == url:
            return self._page[1]
        if len(url) > LONGEST_URL:
            raise ToolRefusal(f"Error: the address has more than {LONGEST_URL} characters.")
        try:
            text = await self.reader.read(url)
        except RefusedError as error:
            raise ToolRefusal(f"Error: {error}") from error
        self._page = url, text or "(the page has no text)"
        return self._page[1]
