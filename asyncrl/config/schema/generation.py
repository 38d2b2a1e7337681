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
        None, "episodes that one actor runs at once; null: learner.batch_size, at most 64", "[1, inf)"
    )
    temperature: float = option(
        1.0, "sampling temperature of training episodes", "(0, inf)", fixed="stored log-probs are at this temperature"
    )
    episode_timeout_s: float = option(3600.0, "seconds after which an episode fails and is tried again", "(0, inf)")
    max_turns: int = option(8, "most assistant turns of an episode", "[1, inf)")
    max_turn_tokens: int = option(512, "most tokens of one assistant turn", "[1, inf)")
    max_tokens: int = option(4096, "most tokens of an episode's sequence, with prompt and tool results", "[1, inf)")
    tools: list[str] = option(
        ["calculator"],
        "tools of the policy: built-in names or dotted paths of Tool classes",
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
    tool_retries: int = option(2, "further attempts at a failing tool before the episode fails", "[0, inf)")
    max_failure_share: float | None = option(
        None,
        "a run ends if at least this share of its latest episodes, or scorings, failed for a minute; null: 0.9 until "
        "fewer than half fail for the first time, and no limit from then on. A run whose first episodes all fail ends "
        "in any case (docs/faults.md)",
        "(0, 1]",
    )
    max_tool_chars: int = option(
        4096,
        "most characters of a tool's result or a user's message; the middle of a longer text is cut out",
        "[1, inf)",
    )
    interactions: dict[str, Any] = option(
        {},
        "simulated users by name: the dotted path of a class, or {class_name: ..., config: ...} (docs/environments.md)",
        fixed="all members of a group talk to the same user",
    )
    interaction_timeout_s: float = option(60.0, "seconds that one call of a simulated user may take", "(0, inf)")
    max_user_turns: int | None = option(
        None, "most messages of a simulated user in an episode; null: any number", "[1, inf)"
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
        "history that a later turn continues; sampled: the sampled tokens; template: the conversation as the chat "
        "template renders it (docs/agents.md)",
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
        "further arguments of the function or class actor.agent, such as {url: http://...}",
    )
    agent_command: list[str] = option(
        [],
        "program, with its arguments, that plays the episodes instead of the actor (docs/agents.md)",
        fixed="all members of a group are played by one agent",
    )
    agent_processes: int | None = option(
        None,
        "number of programs of actor.agent_command, each of which plays one episode after another; null: a new program "
        "for each episode",
        "[1, inf)",
    )
    agent_environment: dict[str, str] = option(
        {},
        "environment variables of the program actor.agent_command, in addition to PATH, HOME, LANG, LC_ALL, TMPDIR, "
        "USER and PYTHONUNBUFFERED",
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
        300.0, "seconds without a request of its remote agent after which an episode fails", "(0, inf)"
    )
    max_total_tokens: int = option(
        16384, "most tokens of all sequences of an episode together (docs/agents.md)", "[1, inf)"
    )
    chat_api_host: str = option("127.0.0.1", "address at which agents reach the policy (docs/agents.md)")
    chat_api_port: int = option(0, "port at actor.chat_api_host; 0: any free port", "[0, 65535]")
    step_split: str = option(
        "turn",
        "unit that gets a step score: turn, paragraph, line, or the dotted path of a function that splits a turn",
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
        "servers that an actor starts and supervises; null: as many as its GPUs can hold, at least one",
        "[1, inf)",
    )
    port: int = option(
        0, "port of the first server; the next servers use the next ports; 0: any free ports", "[0, 65535]"
    )
    tp_size: int = option(1, "GPUs of one server (tensor parallelism)", "[1, inf)")
    memory: float | None = option(
        None, "share of a GPU's memory for weights and cache; null: SGLang's default", "(0, 1)"
    )
    shared: list[int] = option(
        [],
        "indexes of the servers that engine.server.memory limits, because other roles use their GPUs too; empty: all "
        "servers. The placement sets it",
    )
    arguments: list[str] = option([], "further arguments of the server, each word an item: [--attention-backend,fa3]")
    environment: dict[str, str] = option({}, "environment variables of the server", secret="all")
    start_s: float = option(900.0, "seconds that a server may take to start", "(0, inf)")
    max_failures: int = option(
        3, "failed restarts in a row that a server may have; one more ends the actor", "[0, inf)"
    )

    @property
    def device(self) -> str | None:
        """The device that the server's arguments name; `None` if they name none."""
        words = [part for word in self.arguments for part in _name_and_value(word)]
        devices = [value for name, value in pairwise(words) if name == DEVICE]
        # If the argument is repeated, a server takes the last value.
        return devices[-1] if devices else None

    @property
    def on_cpu(self) -> bool:
        """True if the arguments put the server on the CPU."""
        return self.device == "cpu"


@dataclass
class EngineConfig:
    """The engine, which samples tokens."""

    kind: str = option(
        "embedded",
        "embedded: torch in the actor's process; sglang, vllm: servers",
        choices=("embedded", "sglang", "vllm"),
    )
    dtype: str | None = option(
        None,
        "compute dtype of the embedded engine; null: model.dtype; int8, int4: model.dtype, with each row of the "
        "matrices rounded to such integers, to test how a quantized server affects training",
        choices=("float32", "bfloat16", "float16", *LARGEST_INTEGER),
    )
    slots: int = option(64, "requests that the embedded engine decodes at once", "[1, inf)")
    max_length: int | None = option(
        None, "tokens that one slot of the embedded engine holds; null: actor.max_tokens", "[1, inf)"
    )
    urls: list[str] = option([], "URLs of servers; each server is used by one actor only")
    urls_file: str | None = option(None, "file with one server URL a line; it is read again regularly")
    router: str | None = option(None, "URL of an SGLang router that lists the servers")
    segment_tokens: int = option(2048, "most tokens that one request to a server samples; 0: a whole turn", "[0, inf)")
    attempts: int = option(4, "server errors in a row after which a turn fails", "[1, inf)")
    wait_s: float = option(600.0, "most seconds that a turn waits for a server", "(0, inf)")
    check_s: float = option(5.0, "seconds between two checks of a server, and of the list of servers", "(0, inf)")
    silence_s: float = option(60.0, "seconds without an answer after which a server counts as lost", "(0, inf)")
    launch: bool | None = option(
        None,
        "each actor starts SGLang servers on its machine, with the settings engine.server, and supervises them; null: "
        "true if no servers are named",
    )
    python: str = option("python3", "Python that has sglang, for engine.launch")
    return_routed_experts: bool = option(
        False,
        "record the experts of each token in the trajectories, for learner.router_replay (docs/training.md)",
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
        4, "route zmq: latest weight deltas that are kept for engines that missed updates; 0: no deltas", "[0, inf)"
    )
    timeout_s: float = option(30.0, "seconds without an answer after which a transfer of weights fails", "(0, inf)")
    dir: str | None = option(None, "route disk: folder of the weights; null: pushed/ in the run's folder")
    bucket_mb: int = option(64, "megabytes of weights that are gathered and sent at a time", "[1, inf)")
    mode: str = option(
        "retract",
        "treatment of running requests at a weight update (docs/engines.md)",
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
