"""What the built-in tools reach beyond the actor."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.option import option


@dataclass
class FetchConfig:
    """The web pages that the tool `fetch` may get (docs/search.md)."""

    hosts: list[str] = option(
        [],
        "hosts whose pages it gets, such as docs.python.org, *.wikipedia.org for all below one, or HOST:PORT; all "
        "others are refused, and so is one of these that has a private address",
        fixed="all members of a group reach the same pages",
    )
    max_mb: float = option(4.0, "largest page, in MB", "(0, 64]")
