"""Decides for how many requests at once an SGLang server of a run is started.

SGLang records CUDA graphs of decoding for batches up to a size that depends on the GPU only. A larger batch is decoded
kernel by kernel. So each server gets graphs for as many requests as it will have. On an H200, one server with a model
of 135M parameters and short turns gave these tokens per second (SGLang 0.5.17):

| requests at once | largest graph | tokens/s |
|---|---|---|
| 512 | 256, the default | 11,420 |
| 512 | 512 | 17,206 |
| 512 | 512, but without the graphs of prefill | 7,237 |

The graphs of prefill are SGLang's default, and stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config.schema import ServerConfig

UNEVEN = 1.25
"""One of several servers may get more requests than an equal share, by this factor."""
SPARE = 8
"""The number of requests that a server must take in addition to those of episodes. They are canaries and checks of its
health, which must not wait until an episode's request ends."""
STEP = 8
"""Numbers of requests are rounded up to multiples of this, as SGLang's own sizes of graphs are."""
MOST_GRAPHS = 1024
"""The largest batch that gets a graph. Graphs take memory, and time at the start."""
RUNNING = "--max-running-requests"
GRAPHS, GRAPHS_BEFORE = "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs"
RENAMED_IN = (0, 5, 14)
"""The first version of SGLang that knows `GRAPHS`. SGLang 0.5.23 no longer knows `GRAPHS_BEFORE`."""
OWN_GRAPHS = {
    GRAPHS,
    GRAPHS_BEFORE,
    "--cuda-graph-bs",
    "--cuda-graph-bs-decode",
    "--cuda-graph-config",
    "--cuda-graph-backend-decode",
    "--disable-cuda-graph",
    "--disable-decode-cuda-graph",
}
"""Arguments with which a user decides about the graphs of decoding."""
DIVIDED = {"--config", "--dp", "--dp-size", "--data-parallel-size"}
"""Arguments that change the meaning of the numbers, or set them in a file. With one of them, nothing is fitted."""


def requests_of_server(episodes: int, servers: int) -> int:
    """The number of requests that one server must take at once if an actor runs `episodes` at once on its `servers`."""
    share = episodes if servers == 1 else min(episodes, math.ceil(episodes / servers * UNEVEN))
    return math.ceil(share / STEP) * STEP + SPARE


def fitting_arguments(server: ServerConfig, requests: int, version: Sequence[int]) -> list[str]:
    """The arguments of a server that takes this number of `requests` at once. What the user's own arguments decide is
    left out. `version` is that of SGLang; if it is empty, the graphs are left to SGLang."""
    running, graphs = _fitted(server)
    arguments = [RUNNING, str(requests)] if running else []
    if graphs and version:
        name = GRAPHS if tuple(version) >= RENAMED_IN else GRAPHS_BEFORE
        arguments += [name, str(min(requests, MOST_GRAPHS))]
    return arguments


def fitting_words(server: ServerConfig, episodes: int, servers: int) -> str:
    """Say what each of an actor's `servers` is given for its `episodes`, and why; empty if nothing is fitted."""
    running, graphs = _fitted(server)
    requests = requests_of_server(episodes, servers)
    given = [
        *([f"{RUNNING} {requests}"] if running else []),
        *([f"CUDA graphs of decoding up to {min(requests, MOST_GRAPHS)}"] if graphs else []),
    ]
    if not given:
        return ""
    over = "one server" if servers == 1 else f"{servers} servers"
    return f"{' and '.join(given)}, since an actor runs {episodes} episodes at once on {over}"


def _fitted(server: ServerConfig) -> tuple[bool, bool]:
    """The first is true if the number of requests is fitted, the second if the graphs are."""
    names = {word.partition("=")[0] for word in server.arguments}
    if server.device not in (None, "cuda") or names & DIVIDED:
        return False, False
    return RUNNING not in names, not names & OWN_GRAPHS
