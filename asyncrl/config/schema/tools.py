"""The servers and pages that built-in tools reach, and the sandbox of their programs."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.option import option


@dataclass
class FetchConfig:
    """The web pages that the tool `fetch` may get (docs/tools.md)."""

    hosts: list[str] = option(
        [],
        "hosts whose pages it gets, such as docs.python.org, *.wikipedia.org for all below one, or HOST:PORT; all "
        "others are refused, and so is one of these that has a private address",
        fixed="all members of a group reach the same pages",
    )
    max_mb: float = option(4.0, "largest page, in MB", "(0, 64]")


@dataclass
class SearchConfig:
    """The passages of the tool `search` (docs/tools.md)."""

    corpus: str | None = option(
        None,
        "file of passages on each actor's host, Parquet or JSON lines with title and text; null: a small corpus of "
        "facts that comes with asyncrl",
        fixed="all members of a group find the same passages",
    )
    url: str | None = option(
        None,
        "address of a retrieval server in the format of Search-R1, such as http://127.0.0.1:8000/retrieve, in place of "
        "a corpus",
        fixed="all members of a group find the same passages",
    )
    topk: int = option(
        3, "passages that a query finds at most", "[1, 100]", fixed="all members of a group find the same passages"
    )
    indexes: str | None = option(
        None, "folder on each actor's host for the index of a corpus; null: ~/.cache/asyncrl/search"
    )


@dataclass
class SandboxConfig:
    """The sandbox of the programs that the policy writes (docs/tools.md)."""

    kind: str = option(
        "builtin",
        "builtin: processes of this machine; docker, podman: containers; http: a server of SandboxFusion",
        choices=("builtin", "docker", "podman", "http"),
        fixed="all members of a group have the same tools",
    )
    image: str = option("python:3.12-slim", "image of the containers, which has python3 and is on each host already")
    arguments: list[str] = option(
        [],
        "further arguments of `docker run` or `podman run`, such as --runtime=runsc; they can loosen the limits, too",
    )
    url: str | None = option(None, "address of a server of SandboxFusion, such as http://127.0.0.1:8080, for kind=http")
    at_once: int = option(
        16,
        "programs of the tool `python` that one actor has in containers or at a server at once; others wait",
        "[1, inf)",
    )
    memory_mb: int | None = option(
        None,
        "megabytes that the sessions of one actor may take together; others wait with their first call; null: half "
        "of the machine's memory",
        "[1, inf)",
    )
