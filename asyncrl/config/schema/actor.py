"""Episodes: how an actor plays them, with which tools, and within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import option
from asyncrl.config.schema.tools import FetchConfig, SandboxConfig, SearchConfig

MOST_AT_ONCE = 64
"""The maximum number of episodes that an actor runs at once by default. If more episodes run than a batch has, each of
them takes longer and is older when it is trained."""


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
    episode_timeout_s: float = option(
        3600.0,
        "seconds after which an episode fails and is tried again; the time for which it waits for its weight version, "
        "or for a free program, session or agent, does not count; an episode also fails if no agent has requested it "
        "for this many seconds",
        "(0, inf)",
    )
    max_turns: int = option(8, "maximum number of assistant turns in an episode", "[1, inf)")
    max_turn_tokens: int = option(512, "maximum number of tokens in one assistant turn", "[1, inf)")
    max_tokens: int = option(
        4096, "maximum number of tokens in a sequence of an episode, prompt and tool results included", "[1, inf)"
    )
    tools: list[str] = option(
        ["calculator"],
        "tools of the policy: built-in names or dotted paths of Tool classes",
        fixed="all members of a group have the same tools",
    )
    verl_tools: list[Any] = option(
        [],
        "tools written for verl; each item is an entry of a file that verl's tool_config_path names, {class_name: "
        "..., config: {...}, tool_schema: {...}}, or {function_tool_path: FILE} (docs/tools.md)",
        fixed="all members of a group have the same tools",
    )
    mcp_servers: dict[str, Any] = option(
        {},
        "MCP servers by name, as {command: PROGRAM, args: [...]} or {url: http://...}; the policy gets their tools in "
        "addition to actor.tools (docs/tools.md)",
        fixed="all members of a group have the same tools",
    )
    environment: str | None = option(
        None,
        "dotted path of an environment class; each episode has an object of this class, which holds the episode's "
        "state; the methods of the class replace actor.tools (docs/environments.md)",
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
        2, "number of times that a failed tool call is tried again before its episode fails", "[0, inf)"
    )
    max_failure_share: float | None = option(
        None,
        "the run ends if, for a whole minute, at least this share of the latest episodes or of the latest scorings has "
        "failed; null: the limit is 0.9 until the share is below a half for the first time; from then on there is "
        "no limit. A run whose first episodes all fail ends in any case (docs/faults.md)",
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
        "form in which a later turn gets the earlier ones; sampled: their tokens as they were sampled; template: the "
        "conversation as the chat template renders it (docs/agents.md)",
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
        16384,
        "maximum number of tokens in all sequences of an episode together. An agent that rewrites its history begins "
        "a new sequence (docs/agents.md)",
        "[1, inf)",
    )
    chat_api_host: str = option("127.0.0.1", "address at which agents reach the policy (docs/agents.md)")
    chat_api_port: int = option(0, "port at which agents reach the policy; 0: any free port", "[0, 65535]")
    step_split: str = option(
        "turn",
        "the parts of an episode that get a step score each: turn, paragraph or line, or the dotted path of a "
        "function that splits a turn into parts",
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
    def is_split(self) -> bool:
        """True if an episode may consist of several sequences: an outside agent plays it, or each turn renders the
        history with the chat template."""
        return self.played_by is not None or self.history == "template"

    @property
    def largest_episode(self) -> int:
        """The maximum number of tokens of an episode, in all its sequences together."""
        return self.max_total_tokens if self.is_split else self.max_tokens

    @property
    def asks_in_parallel(self) -> bool:
        """True if episodes are played by an agent that may request several turns of an episode at once. The agent for
        OpenEnv requests one turn after the other."""
        return self.played_by is not None and self.agent != "openenv"

    @property
    def has_verl_loops(self) -> bool:
        """True if agent loops of verl play the episodes."""
        return self.agent == "verl"

    @property
    def has_environments(self) -> bool:
        """True if environments provide the tools of the episodes."""
        return self.environment is not None or bool(self.environments)
