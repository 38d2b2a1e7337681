"""The combinations of options of `engine` that cannot work, and the form of server arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from asyncrl.config.quoting import list_word
from asyncrl.config.schema import ActorConfig, ClusterConfig, EngineConfig

VLLM_COLDEST = 0.01
"""The lowest temperature above 0 at which vLLM samples. vLLM raises a lower one to this value without an error."""

NAME_OF_ARGUMENT = re.compile(r"--[^=\s]*\s")
"""The name of a server's option and the space after it, at the start of a word that also has the option's value."""
NEXT_ARGUMENT = re.compile(r"\s+(?=--\w)")
LIST_OF_ARGUMENTS = re.compile(r"\s*\[\s*['\"]?--.*\]\s*", re.DOTALL)
"""A whole list of options in one word, as quotes around the list produce it."""
NEXT_ITEM = re.compile(r",\s*(?=['\"]?--\w)")


def engine_conflicts(engine: EngineConfig, actor: ActorConfig, cluster: ClusterConfig) -> Iterator[str]:
    if engine.return_routed_experts and engine.kind == "vllm":
        yield "engine.return_routed_experts engine.kind: vLLM servers do not report experts; use sglang or embedded"
    if engine.kind == "embedded":
        if engine.max_length is not None and actor.max_tokens > engine.max_length:
            yield "actor.max_tokens engine.max_length: an episode must fit into a slot; lower the first key"
        return
    if engine.dtype is not None:
        yield (
            "engine.dtype engine.kind: it applies only to the embedded engine; give servers an argument such as --dtype"
        )
    sources = {
        "engine.urls": bool(engine.urls),
        "engine.urls_file": engine.urls_file is not None,
        "engine.router": engine.router is not None,
        "engine.launch": engine.launches,
    }
    if sum(sources.values()) != 1:
        given = [key for key, is_set in sources.items() if is_set]
        own = "; with engine.launch=true, the default if no servers are named, actors start servers with engine.python"
        yield (
            f"{' '.join(['engine.kind', *given])}: the engine needs servers: set exactly one of {', '.join(sources)}"
            f"{own if engine.kind == 'sglang' else ''}"
        )
    yield from _server_arguments(engine.server.arguments)
    if engine.server.together > 1 and engine.server.tp_size > 1:
        yield (
            "engine.server.per_gpu engine.server.tp_size: a server has a part of a GPU, or several GPUs; set one of "
            "them to 1"
        )
    if engine.server.together > 1 and engine.server.on_cpu:
        yield "engine.server.per_gpu engine.server.arguments: servers on the CPU have no GPU; set engine.server.count"
    for key, urls in (("engine.urls", engine.urls), ("engine.router", [engine.router] if engine.router else [])):
        if not all(url.startswith(("http://", "https://")) for url in urls):
            yield f"{key}: the url of a server must begin with http:// or https://"
    if engine.launch and engine.kind != "sglang":
        yield (
            "engine.launch engine.kind: it starts SGLang servers only; set the first to null, and name your servers in "
            "engine.urls"
        )
    for key, most in (("actors", cluster.actors or 1), ("autoscale.actors", max(cluster.autoscale.actors, default=1))):
        if most > 1 and not engine.launches:
            yield (
                f"cluster.{key} engine.kind: each server is used by one actor only; name more servers in engine.urls "
                "instead"
            )
    if engine.kind == "vllm" and actor.temperature < VLLM_COLDEST:
        yield f"actor.temperature engine.kind: vLLM samples at {VLLM_COLDEST} or more; set that or more"


def _server_arguments(arguments: Sequence[str]) -> Iterator[str]:
    key = "engine.server.arguments"
    separate = [word for each in arguments for word in _separate(each)]
    if separate != list(arguments):
        wrong = next(each for each in arguments if list(_separate(each)) != [each])
        yield (
            f"{key}: a server reads {wrong!r} as one word; write each name and each value as a separate item: "
            f"{list_word(key, separate)}"
        )


def _separate(argument: str) -> Iterator[str]:
    """The words of a server's command line that a user meant by one item of the list."""
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
