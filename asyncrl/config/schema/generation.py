"""Episodes, the engines that sample them, and how new weights reach these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema.tools import FetchConfig, SandboxConfig, SearchConfig

LARGEST_INTEGER: Mapping[str, int] = {"int8": 127, "int4": 7}
"""The bits of the integers to which an engine of such a dtype rounds its matrices."""
DEVICE = "--device"
"""The option of servers that says where they compute."""


@dataclass
class ActorConfig:
    """Episodes: how many at once, and their limits."""

    concurrency: int = option(64, "episodes that one actor runs at once", "[1, inf)")
    temperature: float = option(
        1.0, "sampling temperature of training episodes", "(0, inf)", fixed="stored log-probs are at this temperature"
    )
    episode_timeout_s: float = option(
        3600.0, "seconds after which an episode fails; then it is tried again", "(0, inf)"
    )
    max_turns: int = option(8, "assistant turns of an episode", "[1, inf)")
    max_turn_tokens: int = option(512, "tokens of one assistant turn", "[1, inf)")
    max_tokens: int = option(4096, "tokens of an episode's sequence, with prompt and tool results", "[1, inf)")
    tools: list[str] = option(
        ["calculator"],
        "tools of the policy: built-in names or dotted paths of Tool classes",
        fixed="all members of a group have the same tools",
    )
    mcp_servers: dict[str, Any] = option(
        {},
        "MCP servers by name, whose tools the policy has, too: {command: PROGRAM, args: [...]} or {url: http://...} "
        "(docs/tools.md)",
        fixed="all members of a group have the same tools",
    )
    environment: str | None = option(
        None,
        "dotted path of a class whose objects hold the state of an episode, and whose methods are its tools in place "
        "of actor.tools (docs/environments.md)",
        fixed="all members of a group are played in one environment",
        secret="none",
    )
    environments: dict[str, str] = option(
        {},
        "several such classes by name, where the column `environment` of a task chooses one (docs/environments.md)",
        fixed="all members of a group are played in one environment",
        secret="none",
    )
    environment_timeout_s: float = option(60.0, "seconds that one call of an environment may take", "(0, inf)")
    tool_timeout_s: float = option(10.0, "seconds that one tool call may take", "(0, inf)")
    tool_retries: int = option(2, "further attempts at a failing tool before the episode fails", "[0, inf)")
    max_failure_share: float | None = option(
        None,
        "share of the last episodes, or of the last scorings, that may fail; above it for a minute, the run ends; "
        "null: no limit. A run always ends if all of its first episodes fail (docs/faults.md)",
        "(0, 1]",
    )
    max_tool_chars: int = option(
        4096, "characters of a tool's result or a user's message; the middle of a longer one is cut", "[1, inf)"
    )
    interactions: dict[str, Any] = option(
        {},
        "simulated users by name: the dotted path of a class, or {class_name: ..., config: ...} (docs/environments.md)",
        fixed="all members of a group talk to the same user",
    )
    interaction_timeout_s: float = option(60.0, "seconds that one call of a simulated user may take", "(0, inf)")
    max_user_turns: int | None = option(
        None, "messages of a simulated user that the policy reads in an episode; null: any number", "[1, inf)"
    )
    template_kwargs: dict[str, Any] = option(
        {},
        "arguments of the chat template, such as {enable_thinking: false}",
        fixed="all members of a group are rendered alike",
        secret="none",
    )
    tool_call_format: str = option(
        "auto",
        "how the model writes tool calls: auto (as its chat template shows them), or one format (docs/models.md)",
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
        "what each turn must be: a JSON schema, a regular expression or a grammar that servers restrict it to; {}: any "
        "text (docs/engines.md)",
        fixed="all members of a group are sampled under one grammar",
        secret="none",
    )
    history: str = option(
        "sampled",
        "what a later turn continues: the sampled tokens, or the template's text (docs/agents.md)",
        choices=("sampled", "template"),
        fixed="all members of a group are rendered alike",
    )
    agent: str | None = option(
        None,
        "dotted path of an agent that plays the episodes instead (docs/agents.md); openenv and nemo_gym play "
        "at servers of these (docs/environments.md)",
        fixed="all members of a group are played by one agent",
    )
    agent_options: dict[str, Any] = option(
        {},
        "what actor.agent gets in addition to its task, such as {url: http://...}: arguments of the function or class",
    )
    agent_command: list[str] = option(
        [],
        "program, with its arguments, that plays the episodes instead (docs/agents.md)",
        fixed="all members of a group are played by one agent",
    )
    agent_processes: int | None = option(
        None, "programs that play one episode after another; null: a new one for each episode", "[1, inf)"
    )
    agent_environment: dict[str, str] = option(
        {},
        "variables that the program has in addition to PATH, HOME, LANG, LC_ALL, TMPDIR, USER and PYTHONUNBUFFERED",
        secret="all",
    )
    agent_sessions: bool = option(
        False,
        "agents elsewhere ask the actor for episodes and play them (docs/agents.md)",
        fixed="all members of a group are played by one agent",
    )
    session_key: str | None = option(
        None,
        "key with which agents elsewhere ask for episodes; null: a new one for each actor, in agents/ of the run",
        secret="all",
    )
    session_timeout_s: float = option(
        300.0, "seconds without a request of its agent after which an episode elsewhere fails", "(0, inf)"
    )
    max_total_tokens: int = option(16384, "tokens of all sequences of an episode together (docs/agents.md)", "[1, inf)")
    chat_api_host: str = option("127.0.0.1", "address at which agents reach the policy (docs/agents.md)")
    chat_api_port: int = option(0, "port at that address; 0: any free port", "[0, 65535]")
    step_split: str = option(
        "turn",
        "what one step is: turn, paragraph, line, or the dotted path of a function",
        fixed="stored step scores belong to such steps",
    )
    fetch: FetchConfig = field(default_factory=FetchConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    @property
    def played_by(self) -> str | None:
        """The option that names what plays the episodes; None: the tools or environments of the actor do."""
        return next(iter(self.agents), None)

    @property
    def agents(self) -> list[str]:
        """The options that name an agent, of which one may be set."""
        given = {
            "actor.agent": self.agent is not None,
            "actor.agent_command": bool(self.agent_command),
            "actor.agent_sessions": self.agent_sessions,
        }
        return [name for name, is_set in given.items() if is_set]

    @property
    def has_environments(self) -> bool:
        """True if the tools of an episode are those of its environment."""
        return self.environment is not None or bool(self.environments)


def _name_and_value(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith(f"{DEVICE}=") else [word]


@dataclass
class ServerConfig:
    """The SGLang servers that an actor starts on its machine with engine.launch."""

    count: int | None = option(
        None, "servers that an actor starts and supervises; null: as many as its GPUs hold, or one", "[1, inf)"
    )
    port: int = option(0, "port of the first server, followed by those of the others; 0: any free ports", "[0, 65535]")
    tp_size: int = option(1, "GPUs of one server (tensor parallelism)", "[1, inf)")
    memory: float | None = option(None, "share of a GPU's memory for weights and cache; null: as SGLang", "(0, 1)")
    shared: list[int] = option(
        [], "numbers of the servers that memory is for, since others use their GPUs too; empty: all. The plan sets it"
    )
    arguments: list[str] = option([], "further arguments of the server, each word an item: [--attention-backend,fa3]")
    environment: dict[str, str] = option({}, "environment variables of the server", secret="all")
    start_s: float = option(900.0, "seconds that a server may take to start", "(0, inf)")
    max_failures: int = option(
        3, "failed restarts in a row that a server may have; one more ends the actor", "[0, inf)"
    )

    @property
    def device(self) -> str | None:
        """The device that the server's arguments name; None: they name none."""
        words = [part for word in self.arguments for part in _name_and_value(word)]
        devices = [value for name, value in pairwise(words) if name == DEVICE]
        # A server takes the last of several.
        return devices[-1] if devices else None

    @property
    def on_cpu(self) -> bool:
        """True if its arguments keep the server from GPUs."""
        return self.device == "cpu"


@dataclass
class EngineConfig:
    """The engine, which samples tokens."""

    kind: str = option(
        "embedded",
        "torch in the actor's process (embedded), or a kind of servers",
        choices=("embedded", "sglang", "vllm"),
    )
    dtype: str | None = option(
        None,
        "compute dtype of the embedded engine; null: model.dtype; int8, int4: that, with each row of its matrices "
        "rounded to such integers, to try what a quantized server does to training",
        choices=("float32", "bfloat16", "float16", *LARGEST_INTEGER),
    )
    slots: int = option(64, "requests that the embedded engine decodes at once", "[1, inf)")
    max_length: int = option(4096, "tokens that one slot of the embedded engine holds", "[1, inf)")
    urls: list[str] = option([], "urls of servers; a server belongs to one actor")
    urls_file: str | None = option(None, "file with one url a line, which is read again regularly")
    router: str | None = option(None, "url of an SGLang router that lists the servers")
    segment_tokens: int = option(2048, "tokens that one request to a server may sample; 0: a whole turn", "[0, inf)")
    attempts: int = option(4, "faults of servers in a row after which a turn fails", "[1, inf)")
    wait_s: float = option(600.0, "seconds that a turn waits for a server", "(0, inf)")
    check_s: float = option(5.0, "seconds between two checks of a server, and of the list of servers", "(0, inf)")
    silence_s: float = option(60.0, "seconds without an answer after which a server counts as lost", "(0, inf)")
    launch: bool | None = option(
        None,
        "whether an actor starts SGLang servers on its machine, as engine.server says, and supervises them; null: if "
        "none are named",
    )
    python: str = option("python3", "Python that has sglang, for engine.launch")
    return_routed_experts: bool = option(
        False,
        "whether trajectories have the experts of each token, for learner.router_replay (docs/training.md)",
    )
    unproven_family: bool = option(
        False, "whether SGLang servers are given a family of models that no test has shown to work (docs/models.md)"
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

    channel: str = option(
        "auto",
        "how weights travel to engines: auto (the fastest that is safe), or one route (docs/weights.md)",
        choices=("auto", "zmq", "disk", "distributed"),
    )
    history: int = option(4, "newest deltas that are kept for engines that missed some (zmq); 0: no deltas", "[0, inf)")
    timeout_s: float = option(30.0, "seconds without an answer after which a transfer of weights fails", "(0, inf)")
    dir: str | None = option(None, "folder of the route disk; null: pushed/ in the run's folder")
    bucket_mb: int = option(64, "megabytes of weights that are gathered and sent in one piece", "[1, inf)")
    mode: str = option(
        "retract",
        "what happens to running requests at an update (docs/engines.md)",
        choices=("in_place", "retract", "abort", "drain"),
    )
    drain_s: float = option(60.0, "mode drain: seconds after which requests that still run are aborted", "[0, inf)")
    into_servers: str = option(
        "auto",
        "how weights get into servers: auto (the fastest that a server takes), or one route (docs/weights.md)",
        choices=("auto", "ipc", "nccl", "disk", "gloo"),
    )
    canary: bool = option(
        True, "send log-probs of a few tokens with each version, which engines must repeat before they serve it"
    )
    canary_tolerance: float | None = option(
        None,
        "largest mean difference of these log-probs, as a share of their spread; null: 0.005 in float32, 0.08 in "
        "bfloat16, 0.3 for a quantized server and engine.dtype=int8, 0.8 for int4",
        "(0, inf)",
    )
    load_s: float = option(
        300.0, "seconds that a server may take to load new weights; then it counts as lost", "(0, inf)"
    )
