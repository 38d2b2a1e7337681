"""The engines that sample episodes, the servers that an actor starts, and how new weights reach the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from asyncrl.config.option import option

LARGEST_INTEGER: Mapping[str, int] = {"int8": 127, "int4": 7}
"""The largest integer of each quantized dtype of the embedded engine."""
DEVICE = "--device"
"""The argument of a server that names its device."""


def _name_and_value(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith(f"{DEVICE}=") else [word]


@dataclass
class ServerConfig:
    """The SGLang servers that an actor starts on its machine with engine.launch."""

    count: int | None = option(
        None,
        "number of servers that an actor starts and supervises; null: as many as its GPUs can hold, but at least one",
        "[1, inf)",
    )
    per_gpu: int | None = option(
        None,
        "number of servers on each GPU; null: up to 4 for a small model with many episodes at once, else 1 "
        "(docs/engines.md)",
        "[1, inf)",
    )
    port: int = option(
        0, "port of the first server; the next servers use the next ports; 0: any free ports", "[0, 65535]"
    )
    tp_size: int = option(
        1, "number of GPUs of one server, which divide each layer among them (tensor parallelism)", "[1, inf)"
    )
    memory: float | None = option(
        None,
        "share of a GPU's memory that all servers on it together use for weights and cache; null: SGLang's default, "
        "or 0.85 for several servers on a GPU",
        "(0, 1)",
    )
    shared: list[int] = option(
        [],
        "indices of the servers that engine.server.memory limits, because other roles also use the GPUs of these "
        "servers; empty: all servers. The placement sets this key",
    )
    arguments: list[str] = option(
        [], "further arguments of the server; each word is an item, as in [--attention-backend,fa3]"
    )
    environment: dict[str, str] = option({}, "environment variables of the server", secret="all")
    start_s: float = option(900.0, "seconds that a server may take to start", "(0, inf)")
    max_failures: int = option(
        3, "number of failed restarts in a row that a server may have; the next failure ends the actor", "[0, inf)"
    )

    @property
    def device(self) -> str | None:
        """The device that the server's arguments name; `None` if they name none."""
        words = [part for word in self.arguments for part in _name_and_value(word)]
        devices = [value for name, value in pairwise(words) if name == DEVICE]
        # If the argument is repeated, a server takes the last value.
        return devices[-1] if devices else None

    @property
    def together(self) -> int:
        """The number of servers on each GPU: one, until `per_gpu` is set."""
        return self.per_gpu or 1

    def gpus_of(self, count: int) -> int:
        """The number of GPUs of `count` servers."""
        return -(-count // self.together) * self.tp_size

    def first_gpu(self, index: int) -> int:
        """The position of the first GPU of server number `index` among the actor's GPUs."""
        return index // self.together * self.tp_size

    @property
    def on_cpu(self) -> bool:
        """True if the arguments put the server on the CPU."""
        return self.device == "cpu"


@dataclass
class EngineConfig:
    """The engine, which samples tokens."""

    kind: str = option(
        "embedded",
        "what samples tokens; embedded: torch in the actor's process; sglang, vllm: servers",
        choices=("embedded", "sglang", "vllm"),
    )
    dtype: str | None = option(
        None,
        "compute dtype of the embedded engine; null: model.dtype; int8, int4: model.dtype, but the matrices of the "
        "layers are rounded to 8-bit or 4-bit integers, to test how a quantized server affects training",
        choices=("float32", "bfloat16", "float16", *LARGEST_INTEGER),
    )
    slots: int = option(64, "number of requests that the embedded engine decodes at once", "[1, inf)")
    max_length: int | None = option(
        None,
        "maximum number of tokens of one request to the embedded engine, prompt included; null: actor.max_tokens",
        "[1, inf)",
    )
    urls: list[str] = option([], "URLs of servers; each server is used by one actor only")
    urls_file: str | None = option(
        None, "file with one server URL a line; actors read it again every engine.check_s seconds"
    )
    router: str | None = option(None, "URL of an SGLang router, from which the actors learn the URLs of the servers")
    segment_tokens: int = option(
        2048, "maximum number of tokens that one request to a server samples; 0: as many as the turn needs", "[0, inf)"
    )
    attempts: int = option(4, "number of server errors in a row after which a turn fails", "[1, inf)")
    wait_s: float = option(600.0, "seconds that a turn waits for a server before it fails", "(0, inf)")
    check_s: float = option(
        5.0, "seconds between two checks of a server, and between two readings of the list of servers", "(0, inf)"
    )
    silence_s: float = option(
        60.0,
        "seconds after which a server counts as lost if it has not answered. After about four times this number of "
        "seconds, a server that the run started is killed and started again",
        "(0, inf)",
    )
    launch: bool | None = option(
        None,
        "true: each actor starts SGLang servers on its machine with the settings engine.server, and supervises them; "
        "null: true if engine.kind=sglang and no servers are named",
    )
    python: str = option("python3", "Python interpreter with the package sglang, for the servers that actors start")
    return_routed_experts: bool = option(
        False,
        "record in the trajectories which experts each token was sent to, for learner.router_replay (docs/training.md)",
    )
    unproven_family: bool = option(
        False, "allow SGLang servers for a model family that no test has shown to work (docs/models.md)"
    )
    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def names_servers(self) -> bool:
        """True if the configuration names servers that the run does not start."""
        return bool(self.urls) or self.urls_file is not None or self.router is not None

    @property
    def launches(self) -> bool:
        """True if an actor starts its own servers."""
        return (self.kind == "sglang" and not self.names_servers) if self.launch is None else self.launch


@dataclass
class WeightsConfig:
    """The routes of new weights from the learner to actors, and from an actor into its servers (docs/weights.md)."""

    to_engines: str = option(
        "auto",
        "route of weights from the learner to the actors; auto: the fastest safe route (docs/weights.md)",
        choices=("auto", "zmq", "disk", "distributed"),
    )
    history: int = option(
        4,
        "route zmq: number of latest deltas (changes from one version to the next) that are kept for engines that "
        "missed updates; 0: no deltas",
        "[0, inf)",
    )
    timeout_s: float = option(
        30.0, "seconds after which a transfer of weights fails if the other side has not answered", "(0, inf)"
    )
    dir: str | None = option(None, "route disk: folder of the weights; null: pushed/ in the run's folder")
    bucket_mb: int = option(64, "megabytes of weights that are gathered and sent at a time", "[1, inf)")
    mode: str = option(
        "retract",
        "what happens to running requests at a weight update (docs/engines.md)",
        choices=("in_place", "retract", "abort", "drain"),
    )
    drain_s: float = option(
        60.0, "mode drain: seconds after which requests that are still running are aborted", "[0, inf)"
    )
    into_servers: str = option(
        "auto",
        "route of weights from an actor into its servers; auto: the fastest route that a server supports "
        "(docs/weights.md)",
        choices=("auto", "ipc", "nccl", "disk", "gloo"),
    )
    canary: bool = option(
        True,
        "send the learner's log-probs of a few tokens with each version; an engine must compute nearly the same "
        "log-probs before it serves the version",
    )
    canary_tolerance: float | None = option(
        None,
        "largest mean difference between the engine's and the learner's canary log-probs, as a share of the standard "
        "deviation of the learner's log-probs; null: 0.005 in float32, 0.08 in bfloat16 and float16, 0.3 for a "
        "quantized server and engine.dtype=int8, 0.8 for int4",
        "(0, inf)",
    )
    load_s: float = option(
        300.0, "seconds that a server may take to load new weights; a slower server counts as lost", "(0, inf)"
    )
