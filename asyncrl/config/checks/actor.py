"""The combinations of options of `actor` that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.bind import CHAT_API_FIX, is_loopback
from asyncrl.config.schema import ActorConfig
from asyncrl.errors import RefusedError
from asyncrl.grammar import FORMS, read_grammar

SHORTEST_KEY = 16
"""The least number of characters of the key with which remote agents request episodes."""


def actor_conflicts(actor: ActorConfig, engine_kind: str, insecure: bool) -> Iterator[str]:
    if actor.is_split and actor.max_total_tokens < actor.max_tokens:
        yield (
            "actor.max_total_tokens actor.max_tokens: an episode must have room for its sequences; raise the first key"
        )
    if actor.step_split not in ("turn", "paragraph", "line") and "." not in actor.step_split:
        yield "actor.step_split: use turn, paragraph or line, or the dotted path of a function"
    if actor.search.corpus is not None and actor.search.url is not None:
        yield "actor.search.corpus actor.search.url: passages come from only one of them; leave one out"
    if actor.search.url is not None and not actor.search.url.startswith(("http://", "https://")):
        yield "actor.search.url: write an address such as http://127.0.0.1:8000/retrieve"
    yield from _sandbox(actor)
    yield from _response_format(actor, engine_kind)
    yield from _environments(actor)
    yield from _agents(actor)
    if not is_loopback(actor.chat_api_host) and not insecure:
        yield f"actor.chat_api_host: other machines can reach this address: {CHAT_API_FIX}"


def _agents(actor: ActorConfig) -> Iterator[str]:
    agent = actor.played_by
    if len(actor.agents) > 1:
        yield f"{' '.join(actor.agents)}: each of them plays the episodes; keep only one of them"
    if actor.interactions and agent:
        yield f"actor.interactions {agent}: an agent plays the user itself; leave one of them out"
    if actor.mcp_servers and agent:
        yield f"actor.mcp_servers {agent}: an agent connects to its servers itself; leave one of them out"
    if actor.verl_tools and agent:
        yield f"actor.verl_tools {agent}: an agent brings its own tools; leave one of them out"
    if actor.agent_options and actor.agent is None:
        yield "actor.agent_options actor.agent: the options need an agent; set the second key, or set the first to {}"
    if actor.agent_processes is not None and not actor.agent_command:
        yield (
            "actor.agent_processes actor.agent_command: the processes need a program; set the second key, or set the "
            "first to null"
        )
    if actor.session_key is not None and len(actor.session_key) < SHORTEST_KEY:
        yield f"actor.session_key: the key is easy to guess; use {SHORTEST_KEY} characters or more, or null"


def _environments(actor: ActorConfig) -> Iterator[str]:
    if not actor.has_environments:
        return
    key = "actor.environments" if actor.environment is None else "actor.environment"
    if actor.environment is not None and actor.environments:
        yield "actor.environment actor.environments: the first is for one class, the second for several; leave one out"
    if agent := actor.played_by:
        yield f"{key} {agent}: an agent plays the environment itself; leave one of them out"
    if actor.tools not in ([], ActorConfig().tools):
        yield f"actor.tools {key}: the methods of an environment are the tools of its episodes; leave out the first"
    for other in ("mcp_servers", "verl_tools"):
        if getattr(actor, other):
            yield f"actor.{other} {key}: the methods of an environment are the tools of its episodes; leave out one"


def _response_format(actor: ActorConfig, engine_kind: str) -> Iterator[str]:
    try:
        grammar = read_grammar(actor.response_format)
    except RefusedError:
        yield f"actor.response_format: use {FORMS}"
        return
    if grammar is None:
        return
    if engine_kind == "embedded":
        yield "actor.response_format engine.kind: the embedded engine cannot follow a grammar; use sglang or vllm"
    if agent := actor.played_by:
        yield (
            f"actor.response_format {agent}: an agent sets response_format in each of its requests; set the first to "
            "{}"
        )
    elif actor.has_environments:
        key = "actor.environments" if actor.environment is None else "actor.environment"
        yield f"actor.response_format {key}: a turn under a grammar cannot call tools; set the first to {{}}"
    elif actor.mcp_servers or actor.verl_tools:
        other = "mcp_servers" if actor.mcp_servers else "verl_tools"
        yield f"actor.response_format actor.{other}: a turn under a grammar cannot call tools; leave out one"
    elif actor.tools:
        yield "actor.response_format actor.tools: a turn under a grammar cannot call tools; set actor.tools=[]"
    if actor.temperature != 1:
        yield (
            "actor.response_format actor.temperature: only at temperature 1 do servers report the probability of the "
            "tokens that a grammar allows, and no token would be trained without it; use 1"
        )


def _sandbox(actor: ActorConfig) -> Iterator[str]:
    sandbox = actor.sandbox
    if (sandbox.kind == "http") != (sandbox.url is not None):
        yield (
            "actor.sandbox.kind actor.sandbox.url: kind=http needs the url of a server, and every other kind needs "
            "url=null"
        )
    if sandbox.url is not None and not sandbox.url.startswith(("http://", "https://")):
        yield "actor.sandbox.url: write an address such as http://127.0.0.1:8080"
    if sandbox.kind == "http" and "python_session" in actor.tools:
        yield (
            "actor.sandbox.kind actor.tools: a server keeps no sessions; use builtin, docker or podman, or the tool "
            "`python`"
        )
