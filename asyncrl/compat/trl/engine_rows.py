"""Translates the keys of TRL for generation and vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.compat.rows import Row, Setting, made, none, used
from asyncrl.compat.trl.source import TrlConfig
from asyncrl.config.other_words import WITHOUT

NEUTRAL = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
"""Values of sampling parameters that change nothing."""


def _engine(source: TrlConfig) -> Iterator[Setting | str]:
    if not source["use_vllm"]:
        if source.says("use_vllm"):
            yield (
                "use_vllm=false: the embedded engine plays the episodes; for models above 0.6B parameters use "
                "engine.kind=sglang"
            )
        return
    yield "engine.kind", "sglang"
    yield (
        "use_vllm=true: asyncrl starts SGLang servers itself (engine.python names a Python that has sglang); for vLLM "
        "servers that you start, set engine.kind=vllm and engine.urls"
    )
    if source["vllm_mode"] == "colocate":
        yield (
            "vllm_mode=colocate: learner and servers have GPUs of their own here; to let them alternate on the same "
            "GPUs, set cluster.colocated=true and replay.max_lag=0"
        )


def _memory(source: TrlConfig) -> Iterator[Setting | str]:
    if source["use_vllm"] and source.says("vllm_gpu_memory_utilization") and source["vllm_mode"] != "colocate":
        yield "engine.server.memory", source["vllm_gpu_memory_utilization"]
    elif source.says("vllm_gpu_memory_utilization"):
        yield (
            f"vllm_gpu_memory_utilization={source['vllm_gpu_memory_utilization']}: left out, since it is a share of a "
            "GPU that the trainer also uses; engine.server.memory is a share of a GPU that only a server uses"
        )


def _width(source: TrlConfig) -> Iterator[Setting | str]:
    if source["use_vllm"] and source["vllm_tensor_parallel_size"] > 1:
        yield "engine.server.tp_size", source["vllm_tensor_parallel_size"]


def _urls(source: TrlConfig) -> Iterator[Setting | str]:
    if source["use_vllm"] and source["vllm_server_base_url"]:
        yield (f"vllm_server_base_url={source['vllm_server_base_url']}: asyncrl cannot use `trl vllm-serve`")


def _grammar(source: TrlConfig) -> Iterator[Setting | str]:
    if pattern := source["vllm_structured_outputs_regex"]:
        yield "actor.response_format", {"type": "regex", "pattern": pattern}


def _sampling(source: TrlConfig) -> Iterator[Setting | str]:
    for key in ("top_p", "top_k", "repetition_penalty"):
        if source[key] not in (None, NEUTRAL[key]):
            why = WITHOUT["repetition_penalty" if key == "repetition_penalty" else "top_p"]
            yield f"{key}={source[key]}: left out, because {why}"


ROWS: tuple[Row, ...] = (
    made(
        "use_vllm",
        "`engine.kind`",
        False,
        "True becomes SGLang servers that the run starts, on other GPUs than the learner's.",
        _engine,
    ),
    used(
        "vllm_mode",
        "`cluster.colocated`",
        "colocate",
        "Left out. The report says how servers and learner can share GPUs.",
    ),
    made(
        "vllm_gpu_memory_utilization",
        "`engine.server.memory`",
        0.3,
        "Copied for `vllm_mode=server`. With `colocate` it is left out, because the servers have their own GPUs.",
        _memory,
    ),
    made("vllm_tensor_parallel_size", "`engine.server.tp_size`", 1, "The same value.", _width),
    used("vllm_max_model_length", "`actor.max_tokens`, `engine.max_length`", None, "The same value."),
    made(
        "vllm_server_base_url",
        "`engine.urls`",
        None,
        "Left out: asyncrl cannot use `trl vllm-serve`. The run starts servers itself.",
        _urls,
    ),
    made("vllm_structured_outputs_regex", "`actor.response_format`", None, "The same pattern.", _grammar),
    made("top_p", "", 1.0, f"Left out, because {WITHOUT['top_p']}.", _sampling),
    used("top_k", "", 0, "As `top_p`."),
    used("repetition_penalty", "", 1.0, f"Left out, because {WITHOUT['repetition_penalty']}."),
    none("", "min_p generation_kwargs", f"Left out, because {WITHOUT['top_p']}."),
    none(
        "",
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_model_impl vllm_enable_sleep_mode "
        "vllm_device vllm_dtype vllm_guided_decoding_regex",
        "The run starts its servers itself; `engine.server.arguments` adds arguments.",
    ),
    none(
        "",
        "cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged",
        "The embedded engine has its own cache and batches continuously.",
    ),
)
