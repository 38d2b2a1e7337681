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

An agent may request several turns of an episode at once, and their number is unknown. So its servers get graphs for
`PARALLEL` requests of each episode, and no limit of requests: a limit would let requests wait.

With this model, the server's scheduler, which is one process, is busy all the time, and the GPU only 29% of the time.
So several servers on the GPU are faster for such a model:

| servers on the GPU | requests at once | tokens/s |
|---|---|---|
| 2 | 512 | 22,406 |
| 4 | 512 | 26,058 |
| 4 | 1,024 | 37,245 |

Servers do not use NVIDIA's MPS: with it, 512 requests were not faster, and 1,024 requests were 13% faster.

SGLang takes its cache from the memory that is free when a server starts, so servers that start at the same time would
take each other's memory. Servers on one GPU are therefore told how many tokens their cache has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import ServerConfig

UNEVEN = 1.25
"""One of several servers may get more requests than an equal share, by this factor."""
PARALLEL = 2
"""The requests of one episode for which servers of an agent get graphs. This number is a guess. Larger batches are
decoded without graphs, which `asyncrl status` says."""
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
FRACTION, TOKENS = "--mem-fraction-static", "--max-total-tokens"
ANY_FRACTION = 0.95
"""The share of the free memory that servers on one GPU may use for weights and cache. The number of tokens limits the
cache further."""
SERVER_BYTES = 12 << 30
"""The memory that a server takes in addition to its weights and cache: for CUDA, and for the graphs of prefill and
decoding. Three servers with SGLang 0.5.17 on an H200 took 11 GB each."""
SHARE = 0.85
"""The share of a GPU's memory that is divided among its servers by default. The rest is for new weights that a server
is loading."""
MOST_TOGETHER = 4
REQUESTS_EACH = 128
"""Several servers on a GPU have at least this many requests each: 4 servers with 128 requests each were measured."""
SMALL_BYTES = 1 << 30
"""The largest weights of a model that gets several servers on a GPU by default. 0.3 GB were measured. With a larger
model, the GPU limits the speed, and not the scheduler."""
CPUS_EACH = 2
"""The number of CPUs that a host must have for each of several servers on a GPU."""
DIVIDED = {"--config", "--dp", "--dp-size", "--data-parallel-size"}
"""Arguments that change the meaning of the fitted numbers, or may set these numbers in a file. With one of these
arguments, nothing is fitted."""


def requests_of_server(episodes: int, servers: int, parallel: bool = False) -> int:
    """The number of requests that one server must take at once if an actor runs `episodes` at once on its `servers`.
    `parallel`: an agent may request several turns of an episode at once."""
    requests = episodes * PARALLEL if parallel else episodes
    share = requests if servers == 1 else min(requests, math.ceil(requests / servers * UNEVEN))
    return math.ceil(share / STEP) * STEP + SPARE


def fitting_arguments(server: ServerConfig, requests: int, version: Sequence[int], parallel: bool = False) -> list[str]:
    """The arguments of a server that takes this number of `requests` at once. What the user's own arguments decide is
    left out. `version` is that of SGLang; if it is empty, the graphs are left to SGLang. `parallel`: see
    `requests_of_server`. The number of requests is then a guess, and no limit."""
    running, graphs = _fitted(server, parallel)
    arguments = [RUNNING, str(requests)] if running else []
    if graphs and version:
        name = GRAPHS if tuple(version) >= RENAMED_IN else GRAPHS_BEFORE
        arguments += [name, str(min(requests, MOST_GRAPHS))]
    return arguments


def fitting_words(server: ServerConfig, episodes: int, servers: int, parallel: bool = False) -> str:
    """Say what each of an actor's `servers` is given for its `episodes`, and why; empty if nothing is fitted.
    `parallel`: see `requests_of_server`."""
    running, graphs = _fitted(server, parallel)
    requests = requests_of_server(episodes, servers, parallel)
    given = [
        *([f"{RUNNING} {requests}"] if running else []),
        *([f"CUDA graphs of decoding up to {min(requests, MOST_GRAPHS)}"] if graphs else []),
    ]
    if not given:
        return ""
    over = "one server" if servers == 1 else f"{servers} servers"
    several = f", and its agent may request several turns of an episode at once ({PARALLEL} are assumed)"
    return f"{' and '.join(given)}, since an actor runs {episodes} episodes at once on {over}{several * parallel}"


def _fitted(server: ServerConfig, parallel: bool) -> tuple[bool, bool]:
    """The first is true if the number of requests is fitted, the second if the graphs are."""
    names = {word.partition("=")[0] for word in server.arguments}
    if server.device not in (None, "cuda") or names & DIVIDED:
        return False, False
    return RUNNING not in names and not parallel, not names & OWN_GRAPHS


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The bytes of a GPU, of the model's weights in a server, and of the keys and values of one token."""

    gpu: int
    weights: int
    token: int


def token_bytes(config: Any, itemsize: int) -> int:
    """The bytes of one token's keys and values, from the Hugging Face configuration of a language model."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * itemsize)


def cache_tokens(memory: GpuMemory, share: float, together: int, wanted: int, longest: int) -> int:
    """The number of tokens in a server's cache: `wanted`, or as many as there is room for. The GPU has `together` such
    servers, which divide a `share` of its memory equally.

    Raises ConfigError: there is no room for one episode of `longest` tokens.
    """
    fixed = memory.weights + SERVER_BYTES
    room = int(memory.gpu * share / together - fixed) // memory.token
    if room < longest:
        fitting = int(memory.gpu * share // (fixed + longest * memory.token))
        mend = f"set it to {fitting} or less" if fitting > 1 else "set it to 1"
        raise ConfigError(
            f"engine.server.per_gpu={together}: {share:.0%} of a GPU's {memory.gpu / 1e9:.0f} GB are too little for "
            f"{together} servers, each of which takes {fixed / 1e9:.0f} GB and a cache; {mend}"
        )
    return min(wanted, room)


def together_arguments(server: ServerConfig, tokens: int) -> list[str]:
    """The arguments of a server that shares its GPU with other servers, and has a cache of `tokens` tokens. What the
    user's own arguments decide is left out."""
    names = {word.partition("=")[0] for word in server.arguments}
    given = {FRACTION: str(ANY_FRACTION), TOKENS: str(tokens)}
    return [word for name, value in given.items() if name not in names for word in (name, value)]


def servers_together(weights: int, episodes: int, cpus: int, gpu: int) -> int:
    """The best number of servers on a GPU for a model with `weights` bytes.

    - `episodes`: the number of episodes at once for each GPU
    - `cpus`: the number of CPUs for the servers of each GPU
    - `gpu`: the bytes of a GPU
    """
    if weights > SMALL_BYTES:
        return 1
    # Half of a server's memory is then for its cache.
    room = int(gpu * SHARE) // (2 * (SERVER_BYTES + weights))
    return max(1, min(MOST_TOGETHER, episodes // REQUESTS_EACH, cpus // CPUS_EACH, room))
