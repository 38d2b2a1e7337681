"""The combinations of options that cannot work.

One function a section finds the combinations that begin with its keys. Every refusal names the keys with their values,
and the fix. `refusals.py` puts them together with what else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.config.bind import CHAT_API_FIX, PROMETHEUS_FIX, is_loopback
from asyncrl.config.deployment_checks import cluster_conflicts, network_conflicts, weights_conflicts
from asyncrl.config.learner_checks import demonstration_conflicts, learner_conflicts
from asyncrl.config.quoting import list_word
from asyncrl.config.schema import ActorConfig, TrainConfig
from asyncrl.config.scoring_checks import scoring_conflicts
from asyncrl.errors import RefusedError
from asyncrl.grammar import FORMS, read_grammar
from asyncrl.machine.remote_folder import is_url

VLLM_COLDEST = 0.01
"""vLLM replaces lower temperatures above 0 by this one, without an error."""

SHORTEST_KEY = 16
"""Characters of the key with which agents elsewhere ask for episodes."""

NAME_OF_ARGUMENT = re.compile(r"--[^=\s]*\s")
"""The name of an option in front of its value, where both are in one word."""
NEXT_ARGUMENT = re.compile(r"\s+(?=--\w)")
LIST_OF_ARGUMENTS = re.compile(r"\s*\[\s*['\"]?--.*\]\s*", re.DOTALL)
"""A list of such options in one word, since there were quotes around all of it."""
NEXT_ITEM = re.compile(r",\s*(?=['\"]?--\w)")


def conflicts(config: TrainConfig) -> Iterator[str]:
    """Every combination that cannot work, as `KEY [KEY ...]: FIX`, where the first key is the one to change.

    Each value must meet its own constraint.
    """
    here = (_run, _model, _data, _actor, _engine, _replay, _observe)
    elsewhere = (learner_conflicts, demonstration_conflicts, scoring_conflicts, weights_conflicts)
    for section in (*here, *elsewhere, cluster_conflicts, network_conflicts):
        yield from section(config)


def _run(config: TrainConfig) -> Iterator[str]:
    if Path(config.run.name).name != config.run.name or config.run.name == "..":
        yield "run.name: it is the name of a folder within run.dir; use a name without slashes, other than . and .."


def _model(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if model.path.startswith(("http://", "https://")):
        yield "model.path: a web server lists no files; name a model on the hub as OWNER/NAME, or use s3:// or the like"
    if model.revision is not None and (is_url(model.path) or Path(model.path).is_dir()):
        yield "model.revision model.path: only models on the hub have revisions; set the first to null"


def _observe(config: TrainConfig) -> Iterator[str]:
    observe = config.observe
    shown = "prometheus" in observe.sinks
    if shown and not is_loopback(observe.prometheus_host) and not config.network.insecure:
        yield f"observe.prometheus_host: other machines can reach this address: {PROMETHEUS_FIX}"
    if "episodes" in observe.upload and not observe.keep_episodes:
        yield "observe.upload observe.keep_episodes: no episodes are kept; raise the second, or leave out episodes"
    if "model" in observe.upload and not config.learner.export:
        yield "observe.upload learner.export: no model is exported; set the second to true, or leave out model"


def _data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    for key, sources in (("data.train", data.train), ("data.eval", data.eval)):
        if sources == []:
            yield f"{key}: name a file of tasks, or several"
    if data.dataset_params and data.dataset is None:
        yield "data.dataset_params data.dataset: there is no class that takes them; name it"
    if data.dataset is not None and data.columns:
        yield "data.columns data.dataset: the class makes the tasks of the files itself; leave one of them out"
    if data.dataset is not None and not data.keep_in_memory:
        yield "data.keep_in_memory data.dataset: the class makes its tasks in memory; set the first to true"
    if wrong := sorted(set(data.columns) & {"reward_model", "extra_info"}):
        yield f"data.columns: name fields in place of {', '.join(wrong)}: ground_truth, and those of extra_info"
    yield from _prompts(config)
    yield from _group_demonstrations(config)
    if len(data.band) not in (0, 2) or sorted(data.band) != list(data.band):
        yield "data.band: give the lowest and the highest success rate, such as [0.1,0.9]"


def _group_demonstrations(config: TrainConfig) -> Iterator[str]:
    manager, key = config.scoring.manager, "data.demonstration"
    if config.data.demonstration is None:
        return
    if config.data.dataset is not None:
        yield f"{key} data.dataset: the class makes tasks without demonstrations; set one of the two to null"
    if agent := config.actor.played_by:
        yield f"{key} {agent}: an agent makes its prompts itself, a demonstration has those of the tasks; set null"
    if config.actor.has_environments:
        yield f"{key} actor.environment: an environment begins the episode itself, a demonstration cannot; set null"
    if config.actor.interactions:
        yield f"{key} actor.interactions: no user scores the turns of a demonstration; set the first to null"
    if config.scoring.shaping.environment_weight:
        yield (
            f"{key} scoring.shaping.environment_weight: the tools do not run for a demonstration, and give it no "
            "reward; set one of the two to null or 0"
        )
    if any(map(manager.of, ("", *manager.sources))):
        yield f"{key} scoring.manager.name: a manager judges what the policy played; set one of the two to null"
    if config.implicit.train:
        yield f"{key} implicit.train: no test has trained this model on demonstrations; set the first to null"


def _prompts(config: TrainConfig) -> Iterator[str]:
    data, actor = config.data, config.actor
    if data.max_prompt_length is None:
        if data.filter_overlong or data.truncation != "error":
            key = "filter_overlong" if data.filter_overlong else "truncation"
            yield f"data.{key} data.max_prompt_length: there is no limit; set the second, or leave out the first"
        return
    if agent := actor.played_by:
        yield f"data.max_prompt_length {agent}: an agent makes its prompts itself; set null"
    if data.max_prompt_length >= actor.max_tokens:
        yield "data.max_prompt_length actor.max_tokens: an answer needs room behind the prompt; lower the first one"
    if data.truncation != "error" and actor.history == "template":
        yield "data.truncation actor.history: the template would render the whole prompt again; use sampled"


def _sandbox(actor: ActorConfig) -> Iterator[str]:
    sandbox = actor.sandbox
    if (sandbox.kind == "http") != (sandbox.url is not None):
        yield "actor.sandbox.kind actor.sandbox.url: kind=http needs the url of a server, and no other kind has one"
    if sandbox.url is not None and not sandbox.url.startswith(("http://", "https://")):
        yield "actor.sandbox.url: write an address such as http://127.0.0.1:8080"
    if sandbox.kind == "http" and "python_session" in actor.tools:
        yield "actor.sandbox.kind actor.tools: a server keeps no sessions; take builtin, docker or podman, or `python`"


def _actor(config: TrainConfig) -> Iterator[str]:
    actor = config.actor
    several = actor.played_by is not None or actor.history == "template"
    if several and actor.max_total_tokens < actor.max_tokens:
        yield "actor.max_total_tokens actor.max_tokens: sequences must fit into an episode; raise the first one"
    if actor.step_split not in ("turn", "paragraph", "line") and "." not in actor.step_split:
        yield "actor.step_split: use turn, paragraph or line, or the dotted path of a function"
    if actor.search.corpus is not None and actor.search.url is not None:
        yield "actor.search.corpus actor.search.url: passages come from one of them; leave the other out"
    if actor.search.url is not None and not actor.search.url.startswith(("http://", "https://")):
        yield "actor.search.url: write an address such as http://127.0.0.1:8000/retrieve"
    yield from _sandbox(actor)
    yield from _response_format(config)
    yield from _environments(config)
    yield from _agents(actor)
    if not is_loopback(actor.chat_api_host) and not config.network.insecure:
        yield f"actor.chat_api_host: other machines can reach this address: {CHAT_API_FIX}"


def _agents(actor: ActorConfig) -> Iterator[str]:
    agent = actor.played_by
    if len(actor.agents) > 1:
        yield f"{' '.join(actor.agents)}: each of them plays the episodes; leave one of them"
    if actor.interactions and agent:
        yield f"actor.interactions {agent}: an agent plays the user itself; leave one of them out"
    if actor.mcp_servers and agent:
        yield f"actor.mcp_servers {agent}: an agent connects to its servers itself; leave one of them out"
    if actor.agent_options and actor.agent is None:
        yield "actor.agent_options actor.agent: there is no agent that gets them; set the second, or {} for the first"
    if actor.agent_processes is not None and not actor.agent_command:
        yield "actor.agent_processes actor.agent_command: there is no program; set the second, or null for the first"
    if actor.session_key is not None and len(actor.session_key) < SHORTEST_KEY:
        yield f"actor.session_key: somebody could guess it; use {SHORTEST_KEY} characters or more, or null"


def _environments(config: TrainConfig) -> Iterator[str]:
    actor = config.actor
    if not actor.has_environments:
        return
    key = "actor.environments" if actor.environment is None else "actor.environment"
    if actor.environment is not None and actor.environments:
        yield "actor.environment actor.environments: the first is for one class, the second for several; leave out one"
    if agent := actor.played_by:
        yield f"{key} {agent}: an agent plays the environment itself; leave one of them out"
    if actor.tools not in ([], ActorConfig().tools):
        yield f"actor.tools {key}: the methods of an environment are the tools of its episodes; leave out the first"
    if actor.mcp_servers:
        yield f"actor.mcp_servers {key}: the methods of an environment are the tools of its episodes; leave out one"


def _response_format(config: TrainConfig) -> Iterator[str]:
    actor = config.actor
    try:
        grammar = read_grammar(actor.response_format)
    except RefusedError:
        yield f"actor.response_format: use {FORMS}"
        return
    if grammar is None:
        return
    if config.engine.kind == "embedded":
        yield "actor.response_format engine.kind: this engine samples without grammars; use sglang or vllm"
    if agent := actor.played_by:
        yield f"actor.response_format {agent}: an agent gives the response_format in each of its requests; set {{}}"
    elif actor.has_environments:
        key = "actor.environments" if actor.environment is None else "actor.environment"
        yield f"actor.response_format {key}: a turn under a grammar cannot call tools; set the first to {{}}"
    elif actor.mcp_servers:
        yield "actor.response_format actor.mcp_servers: a turn under a grammar cannot call tools; leave out one"
    elif actor.tools:
        yield "actor.response_format actor.tools: a turn under a grammar cannot call tools; set actor.tools=[]"
    if actor.temperature != 1:
        yield (
            "actor.response_format actor.temperature: servers tell at temperature 1 only what a grammar leaves of the "
            "policy's probability, and no token would be trained; use 1"
        )


def _engine(config: TrainConfig) -> Iterator[str]:
    engine, actor = config.engine, config.actor
    if engine.return_routed_experts and engine.kind == "vllm":
        yield "engine.return_routed_experts engine.kind: these servers do not tell experts; use sglang or embedded"
    if engine.kind == "embedded":
        if actor.max_tokens > engine.max_length:
            yield "actor.max_tokens engine.max_length: an episode must fit into a slot; lower the first key"
        return
    if engine.dtype is not None:
        yield "engine.dtype engine.kind: it is that of the embedded engine; give servers an argument such as --dtype"
    sources = {
        "engine.urls": bool(engine.urls),
        "engine.urls_file": engine.urls_file is not None,
        "engine.router": engine.router is not None,
        "engine.launch": engine.launches,
    }
    if sum(sources.values()) != 1:
        given = [key for key, is_set in sources.items() if is_set]
        own = "; the last one has actors start servers with engine.python, and is true where none are named"
        yield (
            f"{' '.join(['engine.kind', *given])}: the engine needs servers: set exactly one of {', '.join(sources)}"
            f"{own if engine.kind == 'sglang' else ''}"
        )
    yield from _server_arguments(engine.server.arguments)
    for key, urls in (("engine.urls", engine.urls), ("engine.router", [engine.router] if engine.router else [])):
        if not all(url.startswith(("http://", "https://")) for url in urls):
            yield f"{key}: the url of a server must begin with http:// or https://"
    if engine.launch and engine.kind != "sglang":
        yield "engine.launch engine.kind: it starts SGLang servers only; start others yourself and set engine.urls"
    if (config.cluster.actors or 1) > 1 and not engine.launches:
        yield "cluster.actors engine.kind: a server has one actor; name more servers in engine.urls instead"
    if engine.kind == "vllm" and actor.temperature < VLLM_COLDEST:
        yield f"actor.temperature engine.kind: vLLM samples at {VLLM_COLDEST} or more; set that or more"


def _server_arguments(arguments: Sequence[str]) -> Iterator[str]:
    key = "engine.server.arguments"
    separate = [word for each in arguments for word in _separate(each)]
    if separate != list(arguments):
        wrong = next(each for each in arguments if list(_separate(each)) != [each])
        yield (
            f"{key}: a server reads {wrong!r} as one word; write names and values as items of their own: "
            f"{list_word(key, separate)}"
        )


def _separate(argument: str) -> Iterator[str]:
    """The words of a server's command line that an item of the list means."""
    if LIST_OF_ARGUMENTS.fullmatch(argument):
        for part in NEXT_ITEM.split(argument.strip()[1:-1]):
            # The commas of a JSON value do not end an item.
            for each in part.split(",", 1 if "{" in part or "[" in part else -1):
                yield from _separate(each.strip().strip("'\""))
    elif argument.lstrip().startswith("--"):
        for part in NEXT_ARGUMENT.split(argument.lstrip()):
            yield from part.split(maxsplit=1) if NAME_OF_ARGUMENT.match(part) else [part]
    else:
        yield argument


def _replay(config: TrainConfig) -> Iterator[str]:
    replay, groups = config.replay, config.learner.batch_size // config.learner.group_size
    if replay.shards > groups:
        yield f"replay.shards learner.batch_size learner.group_size: a shard needs a group; use at most {groups} shards"
    if replay.shard >= replay.shards:
        yield f"replay.shard replay.shards: shards are numbered from 0 to {replay.shards - 1}"
    lowest, highest = replay.filter.min_reward, replay.filter.max_reward
    if lowest is not None and highest is not None and lowest > highest:
        yield "replay.filter.min_reward replay.filter.max_reward: every group would be refused; lower the first one"
    if replay.source is not None and not Path(replay.source).is_dir():
        yield "replay.source: name the replay folder of a finished run, such as runs/NAME/replay"
