"""The settings of the built-in tools: fetch, search and the sandbox."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.option import option


@dataclass
class FetchConfig:
    """Web pages that the tool `fetch` may load (docs/tools.md)."""

    hosts: list[str] = option(
        [],
        "hosts whose pages the tool loads, such as docs.python.org, *.wikipedia.org (all its subdomains) or HOST:PORT; "
        "every other host is refused, and so is a listed host with a private address",
        fixed="all members of a group reach the same pages",
    )
    max_mb: float = option(4.0, "largest page, in MB", "(0, 64]")


@dataclass
class SearchConfig:
    """Passages that the tool `search` finds (docs/tools.md)."""

    corpus: str | None = option(
        None,
        "file of passages on each actor's host: Parquet or JSON lines, with the columns title and text; null: a small "
        "corpus of facts that comes with asyncrl",
        fixed="all members of a group find the same passages",
    )
    url: str | None = option(
        None,
        "address of a retrieval server with the API of Search-R1, such as http://127.0.0.1:8000/retrieve, to use "
        "instead of a corpus",
        fixed="all members of a group find the same passages",
    )
    topk: int = option(
        3,
        "maximum number of passages that a query returns",
        "[1, 100]",
        fixed="all members of a group find the same passages",
    )
    indexes: str | None = option(
        None, "folder on each actor's host for the index of a corpus; null: ~/.cache/asyncrl/search"
    )


@dataclass
class SandboxConfig:
    """The sandbox of the programs that the policy writes (docs/tools.md)."""

    kind: str = option(
        "builtin",
        "where the programs run; builtin: in processes of this machine; docker, podman: in containers; http: on a "
        "server of SandboxFusion",
        choices=("builtin", "docker", "podman", "http"),
        fixed="all members of a group have the same tools",
    )
    image: str = option("python:3.12-slim", "container image; it must have python3, and must already be on each host")
    arguments: list[str] = option(
        [],
        "further arguments of `docker run` or `podman run`, such as --runtime=runsc; they can also loosen the "
        "sandbox's limits",
    )
    url: str | None = option(None, "address of a server of SandboxFusion, such as http://127.0.0.1:8080, for kind=http")
    at_once: int = option(
        16,
        "maximum number of programs of the tool `python` that one actor runs at once in containers or on a server; "
        "further programs wait",
        "[1, inf)",
    )
    memory_mb: int | None = option(
        None,
        "megabytes that all sandbox sessions of one actor may take together; a session that does not fit waits at its "
        "first call; null: half of the machine's memory",
        "[1, inf)",
    )
