"""Episodes, the engines that sample them, and how new weights reach these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.schema.option import option


@dataclass
class ActorConfig:
    """Episodes: how many at once, and their limits."""

    concurrency: int = option(64, "episodes that one actor runs at once")
    temperature: float = option(1.0, "sampling temperature of training episodes")
    episode_timeout_s: float = option(
        3600.0, "seconds after which an episode is given up and tried anew; waiting for a version is not counted"
    )
    max_turns: int = option(8, "assistant turns an episode may have")
    max_turn_tokens: int = option(512, "tokens that one assistant turn may have")
    max_tokens: int = option(4096, "tokens that an episode's sequence may have, prompt and tool results included")
    tools: list[str] = option(["calculator"], "tools on offer: built-in names or dotted paths of Tool classes")
    tool_timeout_s: float = option(10.0, "seconds that one tool call may take")
    tool_retries: int = option(2, "times that a failing tool is tried again before the episode fails")
    max_tool_chars: int = option(4096, "characters of a tool's result that the policy sees; the middle of more is cut")
    template_kwargs: dict[str, Any] = option({}, "what the chat template takes, such as {enable_thinking: false}")
    history: str = option(
        "sampled", "what episodes go on from where the template rewrites it: sampled | template (docs/agents.md)"
    )
    agent: str | None = option(None, "dotted path of an agent that plays the episodes instead (docs/agents.md)")
    max_total_tokens: int = option(
        16384,
        "tokens of an episode that may have several sequences: an agent's, or one with history=template",
    )
    door_host: str = option("127.0.0.1", "address at which agents reach the policy")
    door_port: int = option(0, "port there; 0 takes a free one")
    step_split: str = option(
        "turn", "what a process-reward step is: turn | paragraph | line | the dotted path of a function"
    )


@dataclass
class ServerConfig:
    """The SGLang servers that an actor starts on its own machine where engine.launch is set."""

    count: int = option(1, "servers that an actor starts and supervises")
    port: int = option(0, "port of the first server, the others follow; 0 takes free ones")
    tp_size: int = option(1, "GPUs that one server is spread over")
    first_gpu: int = option(0, "GPU of the first server; the others follow")
    memory: float | None = option(None, "share of a GPU's memory for weights and cache; none lets SGLang choose")
    arguments: list[str] = option([], "further arguments of the server")
    environment: dict[str, str] = option({}, "environment variables of the server")
    start_s: float = option(900.0, "seconds that a server may take to start")
    max_failures: int = option(3, "starts in a row that may fail, once it has run, before the actor gives up")


@dataclass
class EngineConfig:
    """What samples tokens."""

    kind: str = option(
        "embedded", "engine: embedded (in-process torch) | sglang | vllm (servers: docs/sglang.md, docs/vllm.md)"
    )
    slots: int = option(64, "requests that the embedded engine decodes at once")
    max_length: int = option(4096, "tokens that one slot of the embedded engine holds")
    urls: list[str] = option([], "urls of servers; each belongs to one actor")
    urls_file: str | None = option(None, "file with one url a line, read again and again: servers may come and go")
    router: str | None = option(None, "url of an SGLang router that names the servers")
    prefix_cache: str = option("flush", "prefixes of older versions: flush | salt (kept apart by version)")
    sampling: dict[str, Any] = option({}, "sampling options besides temperature; those that bend log-probs are refused")
    segment_tokens: int = option(
        2048, "tokens that one request to a server asks for, the most that its death loses; 0 is the whole turn"
    )
    attempts: int = option(4, "server faults in a row after which a turn fails")
    wait_s: float = option(600.0, "seconds that a turn waits for a server")
    check_s: float = option(5.0, "seconds between two looks at a server, and for servers")
    silence_s: float = option(60.0, "seconds without an answer after which a server counts as lost")
    launch: bool = option(False, "start SGLang servers on this machine, as engine.server says, and supervise them")
    python: str = option("python3", "Python that has sglang, whose pins differ from ours; for engine.launch")
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class WeightsConfig:
    """How new weights travel from the learner to the engines (docs/weights.md), and how they get into servers."""

    channel: str = option("zmq", "how they travel: zmq (pull) | disk (shared folder) | distributed (gloo or NCCL)")
    fallback: str = option("none", "channel of engines that the first does not reach: none | zmq | disk")
    history: int = option(4, "deltas kept for engines that are behind, zmq only; 0 sends whole versions only")
    timeout_s: float = option(30.0, "seconds that learner and engine wait for a silent other side")
    dir: str | None = option(None, "folder of the disk channel; none is pushed/ in the run's folder")
    bucket_mb: int = option(64, "megabytes of weights that are gathered, broadcast, or put into a server at a time")
    mode: str = option("retract", "requests under way at an update of servers: in_place | retract | abort | drain")
    drain_s: float = option(60.0, "seconds after which a drain becomes an abort")
    transports: list[str] = option(
        ["tensor"], "ways into a server, the first that it takes: tensor | disk | distributed | ipc"
    )
    staging: str = option("cpu", "where an actor holds a version for its servers: cpu | cuda | cuda:N")
    load_s: float = option(300.0, "seconds that one call of an update may take before the server counts as lost")
