"""Episodes, the engines that sample them, and how new weights reach the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema.tools import FetchConfig, SandboxConfig, SearchConfig

LARGEST_INTEGER: Mapping[str, int] = {"int8": 127, "int4": 7}
"""The largest integer of each quantized dtype of the embedded engine."""
MOST_AT_ONCE = 64
"""The maximum number of episodes that an actor runs at once by default. If more episodes run than a batch has, each of
them takes longer and is older when it is trained."""
DEVICE = "--device"
"""The argument of a server that names its device."""


@dataclass
class ActorConfig:
    """Episodes: how many at once, and their limits."""

    concurrency: int | None = option(
        None, "number of episodes that one actor runs at once; null: learner.batch_size, but at most 64", "[1, inf)"
    )
    temperature: float = option(
        1.0,
        "sampling temperature of training episodes",
        "(0, inf)",
        fixed="stored log-probs were computed at this temperature",
    )
    episode_timeout_s: float = option(3600.0, "seconds after which an episode fails and is tried again", "(0, inf)")
    max_turns: int = option(8, "maximum number of assistant turns in an episode", "[1, inf)")
    max_turn_tokens: int = option(512, "maximum number of tokens in one assistant turn", "[1, inf)")
    max_tokens: int = option(
        4096, "maximum number of tokens in an episode's sequence, prompt and tool results included", "[1, inf)"
    )
    tools: list[str] = option(
        ["calculator"],
        "tools of the policy: built-in names or dotted paths of Tool classes",
        fixed="all members of a group have the same tools",
    )
    verl_tools: list[Any] = option(
        [],
        "tools written for verl: the entries of a file of its tool_config_path, {class_name: ..., config: {...}, "
        "tool_schema: {...}}, or {function_tool_path: FILE} (docs/tools.md)",
        fixed="all members of a group have the same tools",
    )
    mcp_servers: dict[str, Any] = option(
        {},
        "MCP servers by name; the policy also gets their tools: {command: PROGRAM, args: [...]} or {url: http://...} "
        "(docs/tools.md)",
        fixed="all members of a group have the same tools",
    )
    environment: str | None = option(
        None,
        "dotted path of an environment class: an object holds the state of one episode, and its methods replace "
        "actor.tools (docs/environments.md)",
        fixed="all members of a group are played in one environment",
        secret="none",
    )
    environments: dict[str, str] = option(
        {},
        "several environment classes by name; the column `environment` of a task chooses one (docs/environments.md)",
        fixed="all members of a group are played in one environment",
        secret="none",
    )
    environment_timeout_s: float = option(60.0, "seconds that one call of an environment may take", "(0, inf)")
    tool_timeout_s: float = option(10.0, "seconds that one tool call may take", "(0, inf)")
    tool_retries: int = option(
        2, "number of further attempts at a tool call that fails, before the episode fails", "[0, inf)"
    )
    max_failure_share: float | None = option(
        None,
        "the run ends if, for a minute, at least this share of the latest episodes failed, or of the latest scorings; "
        "null: 0.9 until the share is below a half for the first time, and no limit from then on. A run whose first "
        "episodes all fail ends in any case (docs/faults.md)",
        "(0, 1]",
    )
    max_tool_chars: int = option(
        4096,
        "maximum number of characters in a tool's result or a simulated user's message; the middle of a longer text "
        "is cut out",
        "[1, inf)",
    )
    interactions: dict[str, Any] = option(
        {},
        "simulated users by name: the dotted path of a class, or {class_name: ..., config: ...} (docs/environments.md)",
        fixed="all members of a group talk to the same user",
    )
    interaction_timeout_s: float = option(60.0, "seconds that one call of a simulated user may take", "(0, inf)")
    max_user_turns: int | None = option(
        None, "maximum number of messages of a simulated user in an episode; null: no limit", "[1, inf)"
    )
    template_kwargs: dict[str, Any] = option(
        {},
        "arguments of the chat template, such as {enable_thinking: false}",
        fixed="all members of a group are rendered alike",
        secret="none",
    )
    tool_call_format: str = option(
        "auto",
        "format of the model's tool calls; auto: the format that its chat template shows (docs/models.md)",
        choices=(
            "auto",
            "hermes",
            "llama3",
            "mistral",
            "mistral_v11",
            "deepseek_v3",
            "deepseek_v3_1",
            "glm",
            "qwen3_coder",
            "kimi",
            "harmony",
        ),
        fixed="all members of a group call tools alike",
    )
    end_tokens: list[str] = option(
        [],
        "special tokens that end a turn, such as ['<|eot|>'], in addition to those of the chat template and of the "
        "model's generation_config.json (docs/models.md)",
        fixed="all members of a group end their turns alike",
    )
    response_format: dict[str, Any] = option(
        {},
        "JSON schema, regular expression or grammar to which servers restrict each turn; {}: any text "
        "(docs/engines.md)",
        fixed="all members of a group are sampled under one grammar",
        secret="none",
    )
    history: str = option(
        "sampled",
        "history that a later turn continues; sampled: the tokens of the earlier turns as they were sampled; "
        "template: the conversation as the chat template renders it (docs/agents.md)",
        choices=("sampled", "template"),
        fixed="all members of a group are rendered alike",
    )
    agent: str | None = option(
        None,
        "agent that plays the episodes instead of the actor: a dotted path (docs/agents.md), openenv or nemo_gym for "
        "servers of these projects (docs/environments.md), or verl for agent loops (docs/verl.md)",
        fixed="all members of a group are played by one agent",
    )
    agent_options: dict[str, Any] = option(
        {},
        "further arguments of the function or class that actor.agent names, such as {url: http://...}",
    )
    agent_command: list[str] = option(
        [],
        "program that plays the episodes instead of the actor, and its arguments (docs/agents.md)",
        fixed="all members of a group are played by one agent",
    )
    agent_processes: int | None = option(
        None,
        "number of processes of actor.agent_command that one actor starts, each of which plays one episode after "
        "another; null: a new process for each episode",
        "[1, inf)",
    )
    agent_environment: dict[str, str] = option(
        {},
        "environment variables of the program that actor.agent_command names, in addition to PATH, HOME, LANG, LC_ALL, "
        "TMPDIR, USER and PYTHONUNBUFFERED",
        secret="all",
    )
    agent_sessions: bool = option(
        False,
        "remote agents request episodes from the actor and play them (docs/agents.md)",
        fixed="all members of a group are played by one agent",
    )
    session_key: str | None = option(
        None,
        "key with which remote agents request episodes; null: each actor makes a new key, and writes it to agents/ in "
        "the run's folder",
        secret="all",
    )
    session_timeout_s: float = option(
        300.0, "seconds after which an episode fails if its remote agent has made no request", "(0, inf)"
    )
    max_total_tokens: int = option(
        16384, "maximum number of tokens in all sequences of an episode together (docs/agents.md)", "[1, inf)"
    )
    chat_api_host: str = option("127.0.0.1", "address at which agents reach the policy (docs/agents.md)")
    chat_api_port: int = option(0, "port at which agents reach the policy; 0: any free port", "[0, 65535]")
    step_split: str = option(
        "turn",
        "what gets a step score: a turn, a paragraph or a line (turn, paragraph, line), or each part into which a "
        "function splits a turn (its dotted path)",
        fixed="stored step scores belong to these steps",
    )
    fetch: FetchConfig = field(default_factory=FetchConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def at_once(self, batch_size: int) -> int:
        """The number of episodes that one actor of a run with this `learner.batch_size` runs at once."""
        return self.concurrency or min(MOST_AT_ONCE, batch_size)

    @property
    def played_by(self) -> str | None:
        """The option that names an agent; `None` if the actor plays the episodes itself."""
        return next(iter(self.agents), None)

    @property
    def agents(self) -> list[str]:
        """The options that are set to an agent. Only one of them may be set."""
        given = {
            "actor.agent": self.agent is not None,
            "actor.agent_command": bool(self.agent_command),
            "actor.agent_sessions": self.agent_sessions,
        }
        return [name for name, is_set in given.items() if is_set]

    @property
    def has_verl_loops(self) -> bool:
        """True if agent loops of verl play the episodes."""
        return self.agent == "verl"

    @property
    def has_environments(self) -> bool:
        """True if environments provide the tools of the episodes."""
        return self.environment is not None or bool(self.environments)


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
        "share of a GPU's memory for weights and cache, of all servers on it together; null: SGLang's default, or 0.85 "
        "for several servers on a GPU",
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
    urls_file: str | None = option(None, "file with one server URL a line; it is read again regularly")
    router: str | None = option(None, "URL of an SGLang router, which names the servers")
    segment_tokens: int = option(
        2048, "maximum number of tokens that one request to a server samples; 0: as many as the turn needs", "[0, inf)"
    )
    attempts: int = option(4, "number of server errors in a row after which a turn fails", "[1, inf)")
    wait_s: float = option(600.0, "seconds that a turn waits for a server before it fails", "(0, inf)")
    check_s: float = option(
        5.0, "seconds between two checks of a server, and between two readings of the list of servers", "(0, inf)"
    )
    silence_s: float = option(60.0, "seconds after which a server counts as lost if it has not answered", "(0, inf)")
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
    """The routes of new weights from the learner to the engines, and into servers (docs/weights.md)."""

    to_engines: str = option(
        "auto",
        "route of weights to engines; auto: the fastest safe route (docs/weights.md)",
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
        "route of weights into servers; auto: the fastest route that a server supports (docs/weights.md)",
        choices=("auto", "ipc", "nccl", "disk", "gloo"),
    )
    canary: bool = option(
        True,
        "send the learner's log-probs of a few tokens with each version; an engine must repeat them before it serves "
        "the version",
    )
    canary_tolerance: float | None = option(
        None,
        "largest mean difference between the engine's and the learner's canary log-probs, as a share of their spread; "
        "null: 0.005 in float32, 0.08 in bfloat16, 0.3 for a quantized server and engine.dtype=int8, 0.8 for int4",
        "(0, inf)",
    )
    load_s: float = option(
        300.0, "seconds that a server may take to load new weights; a slower server counts as lost", "(0, inf)"
    )
