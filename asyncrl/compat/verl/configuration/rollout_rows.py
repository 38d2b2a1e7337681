"""Translates the keys of verl's section `actor_rollout_ref.rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.compat.rows import Row, Setting, made, none, same, used
from asyncrl.compat.verl.configuration.actor_rows import router_replay_of
from asyncrl.compat.verl.configuration.data_rows import MEMBERS
from asyncrl.compat.verl.configuration.loop_settings import (
    AGENT,
    LOOP,
    ROLLOUT,
    TOOL_LOOP,
    TURNS,
    loop_options,
    wrong_loops,
)
from asyncrl.compat.verl.configuration.named_files import missing_file
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.verl.configuration.tool_rows import tool_settings
from asyncrl.compat.yaml_files import read_yaml
from asyncrl.config.group_files import FAILURES

WITHOUT_LOOPS = {
    "max_parallel_calls": "all calls of a turn run at once.",
    "tool_response_truncate_side": "the middle of a long result is cut out.",
}
VALIDATION = f"{ROLLOUT}.val_kwargs"
FORMATS = {"hermes": "hermes", "llama3_json": "llama3", "qwen3_coder": "qwen3_coder", "gpt-oss": "harmony"}
ANSWER_CHECKER = "asyncrl.commands.demo.AnswerChecker"
VERL_INTERACTION = "asyncrl.compat.verl.VerlInteraction"
DEFAULT_MEMORY = 0.5
OFF = {"enforce_eager": "--disable-cuda-graph", "enable_prefix_caching": "--disable-radix-cache"}
"""Maps keys of verl to options that turn a feature of SGLang off. The options are set for `enforce_eager=true` and for
`enable_prefix_caching=false`."""
OPTIONS = {
    "max_num_seqs": "--max-running-requests",
    "max_model_len": "--context-length",
    "expert_parallel_size": "--ep-size",
    "scheduling_policy": "--schedule-policy",
}
SHIPPED = {"max_num_seqs": 256, "max_model_len": None, "expert_parallel_size": 1, "scheduling_policy": "fcfs"}
"""verl's defaults for the keys of OPTIONS. A key with its default makes no option, so that SGLang chooses."""
OF_VERL = ("custom_weight_loader",)
"""Options that only verl's own servers know."""
UNBOUNDED_TURNS = 64
"""The limit of turns if verl limits an episode only by its tokens."""


def _engine(source: VerlConfig) -> Iterator[Setting | str]:
    name = source[f"{ROLLOUT}.name"]
    yield "engine.kind", "embedded" if name == "hf" else "sglang"
    if name not in ("sglang", "sglang_async", "hf"):
        yield (
            f"{ROLLOUT}.name={'null' if name is None else name}: asyncrl starts SGLang servers itself "
            "(engine.python names a Python that has sglang); for vLLM servers that you start, set engine.kind=vllm and "
            "engine.urls"
        )


def _routed_experts(source: VerlConfig) -> Iterator[Setting | str]:
    if source[f"{ROLLOUT}.enable_rollout_routing_replay"] or router_replay_of(source) == "R3":
        yield "engine.return_routed_experts", True


def _tensor_parallel(source: VerlConfig) -> Iterator[Setting | str]:
    if source[f"{ROLLOUT}.name"] != "hf":
        yield "engine.server.tp_size", source[f"{ROLLOUT}.tensor_model_parallel_size"]


def _memory(source: VerlConfig) -> Iterator[Setting | str]:
    share = source[f"{ROLLOUT}.gpu_memory_utilization"]
    if share == DEFAULT_MEMORY or source[f"{ROLLOUT}.name"] == "hf":
        return
    yield "engine.server.memory", share
    yield (
        f"{ROLLOUT}.gpu_memory_utilization={share}: in verl the learner uses the rest of the GPU; here a "
        "server has the whole GPU, so set engine.server.memory=null unless cluster.colocated=true"
    )


def _arguments(source: VerlConfig) -> Iterator[Setting | str]:
    if source[f"{ROLLOUT}.name"] == "hf":
        return
    words = [word for name, word in OFF.items() if source[f"{ROLLOUT}.{name}"] is (name == "enforce_eager")]
    for name, flag in OPTIONS.items():
        if source[f"{ROLLOUT}.{name}"] != SHIPPED[name]:
            words += [flag, str(source[f"{ROLLOUT}.{name}"])]
    for name, value in source.below(f"{ROLLOUT}.engine_kwargs.sglang").items():
        flag = f"--{name.replace('_', '-')}"
        if "." in name or name in OF_VERL or value is False or isinstance(value, Mapping):
            yield (
                f"{ROLLOUT}.engine_kwargs.sglang.{name}: left out, since it is false, a section, or an option that "
                "SGLang lacks; name SGLang's option in engine.server.arguments"
            )
        elif value is not None:
            given = [] if value is True else value if isinstance(value, list) else [value]
            words += [flag, *map(str, given)]
    if words:
        yield "engine.server.arguments", words


def _whole_distribution(source: VerlConfig) -> Iterator[Setting | str]:
    for name, off in (("top_p", 1), ("top_k", -1)):
        value = source[f"{ROLLOUT}.{name}"]
        if value not in (None, off, 0):
            yield (
                f"{ROLLOUT}.{name}={value}: ignored. Training samples from the whole distribution, because the "
                "learner computes log-probs of the whole distribution"
            )


def _validation(source: VerlConfig) -> Iterator[Setting | str]:
    attempts = source[f"{VALIDATION}.n"]
    sampled = source[f"{VALIDATION}.do_sample"]
    yield "learner.eval_attempts", attempts
    if sampled and attempts == 1:
        yield f"{VALIDATION}.do_sample=true: a single attempt is greedy here; set learner.eval_attempts to 2 or more"
    training = source[f"{ROLLOUT}.temperature"]
    if attempts > 1 and not sampled:
        yield (
            f"{VALIDATION}.n={attempts}: several attempts are sampled at actor.temperature={training}, while verl "
            "decodes them greedily without do_sample=true; set learner.eval_attempts=1 for a greedy attempt"
        )
    if sampled and attempts > 1 and source[f"{VALIDATION}.temperature"] != training:
        yield (
            f"{VALIDATION}.temperature={source[f'{VALIDATION}.temperature']}: attempts are sampled at "
            f"actor.temperature={training}"
        )
    for name, off in (("top_p", 1), ("top_k", -1)):
        if sampled and source[f"{VALIDATION}.{name}"] not in (None, off, 0):
            yield f"{VALIDATION}.{name}={source[f'{VALIDATION}.{name}']}: ignored, as for training"


def _turns(source: VerlConfig) -> Iterator[Setting | str]:
    if loops := loop_options(source):
        turns = source[f"{TURNS}.max_assistant_turns"] or source[f"{TURNS}.max_turns"]
        yield from {"actor.agent": "verl", "actor.agent_options": loops}.items()
        yield from _limit_of_turns(turns)
        yield "actor.max_tool_chars", source[f"{TURNS}.max_tool_response_length"]
        yield from wrong_loops(source)
        return
    for name, without in WITHOUT_LOOPS.items():
        if source.says(f"{TURNS}.{name}"):
            yield f"{TURNS}.{name}={source[f'{TURNS}.{name}']}: ignored: {without}"
    if not (source[f"{TURNS}.enable"] or source[LOOP] == TOOL_LOOP):
        yield "actor.max_turns", 1
        yield "actor.tools", []
        for name in ("tool_config_path", "function_tool_path"):
            if path := source[f"{TURNS}.{name}"]:
                yield (
                    f"{TURNS}.{name}={path}: left out, because episodes of {source[LOOP]} have no tools; if the rows "
                    f"name {TOOL_LOOP} in their column agent_name, set {TURNS}.enable=true"
                )
        return
    turns = source[f"{TURNS}.max_assistant_turns"] or source[f"{TURNS}.max_turns"] or source[f"{TURNS}.max_user_turns"]
    yield from _limit_of_turns(turns)
    yield "actor.max_tool_chars", source[f"{TURNS}.max_tool_response_length"]
    yield "actor.tool_call_format", FORMATS.get(source[f"{TURNS}.format"], "auto")
    if source[f"{TURNS}.format"] not in FORMATS:
        yield f"{TURNS}.format={source[f'{TURNS}.format']}: actor.tool_call_format is auto, the chat template's format"
    yield from tool_settings(TURNS, source[f"{TURNS}.tool_config_path"], source[f"{TURNS}.function_tool_path"])
    yield from _interactions(source)


def _limit_of_turns(turns: int | None) -> Iterator[Setting | str]:
    yield "actor.max_turns", turns or UNBOUNDED_TURNS
    if not turns:
        yield f"{TURNS} sets no number of turns: actor.max_turns is {UNBOUNDED_TURNS}"


def _interactions(source: VerlConfig) -> Iterator[Setting | str]:
    key = f"{TURNS}.interaction_config_path"
    if not (path := source[key]):
        return
    if line := missing_file(key, path):
        yield line
        return
    try:
        content = read_yaml(Path(path).expanduser())
        users = dict(_user(each) for each in content["interaction"])
    except (*FAILURES, KeyError, TypeError, AttributeError) as error:
        yield (
            f"{key}={path}: it cannot be read ({type(error).__name__}); name the users in actor.interactions "
            "(docs/environments.md)"
        )
        return
    yield "actor.interactions", users
    if source[f"{TURNS}.max_user_turns"]:
        yield "actor.max_user_turns", source[f"{TURNS}.max_user_turns"]
    if any(user["class_name"] == ANSWER_CHECKER for user in users.values()):
        yield f"{key}: verl's Gsm8kInteraction is {ANSWER_CHECKER} here"
    yield (
        f"{key}: the policy's last turn gets a score here; verl ends the episode before it scores this turn. "
        "scoring.shaping.environment_weight adds the scores to the reward; in verl your reward function must add them"
    )


def _user(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and our settings of a simulated user, given its entry in verl's file."""
    path = str(entry["class_name"])
    config = dict(entry.get("config") or {})
    name = str(entry.get("name") or _last(path).removesuffix("Interaction").lower() or _last(path).lower())
    if _last(path) == "Gsm8kInteraction" and path.startswith("verl."):
        return name, {"class_name": ANSWER_CHECKER, "config": {"strict": True}}
    return name, {"class_name": VERL_INTERACTION, "config": {**config, "class_name": path}}


def _last(path: str) -> str:
    return path.rpartition(".")[2]


ROWS = (
    made(
        f"{ROLLOUT}.name",
        "`engine.kind`",
        None,
        "`sglang` and `vllm` become SGLang servers that the run starts, and `hf` becomes the embedded engine.",
        _engine,
    ),
    used(MEMBERS, "`learner.group_size`", 1, "The number of members of a group."),
    same(f"{ROLLOUT}.temperature", "actor.temperature", 1.0),
    made(
        f"{ROLLOUT}.top_p",
        "",
        1,
        "Training samples from the whole distribution, for which the learner computes log-probs.",
        _whole_distribution,
    ),
    used(f"{ROLLOUT}.top_k", "", -1, "It is treated like `top_p`."),
    made(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "`engine.server.tp_size`",
        2,
        "The number of GPUs of one server.",
        _tensor_parallel,
    ),
    made(
        f"{ROLLOUT}.gpu_memory_utilization",
        "`engine.server.memory`",
        DEFAULT_MEMORY,
        "The same value. But with verl's default 0.5, SGLang chooses, because a server has its GPUs to itself unless "
        "`cluster.colocated=true`.",
        _memory,
    ),
    made(
        f"{ROLLOUT}.enforce_eager",
        "`engine.server.arguments`",
        False,
        "True becomes `--disable-cuda-graph`.",
        _arguments,
    ),
    used(
        f"{ROLLOUT}.enable_prefix_caching", "`engine.server.arguments`", True, "False becomes `--disable-radix-cache`."
    ),
    *(
        used(
            f"{ROLLOUT}.{name}",
            "`engine.server.arguments`",
            SHIPPED[name],
            f"Becomes `{flag}`, unless it is verl's default.",
        )
        for name, flag in OPTIONS.items()
    ),
    Row(
        (f"{ROLLOUT}.engine_kwargs.sglang.*",),
        "`engine.server.arguments`",
        "`a_b: 1` becomes `--a-b 1`. False, sections and verl's own `custom_weight_loader` are left out.",
    ),
    none(
        ROLLOUT,
        "prompt_length response_length",
        "`data.max_prompt_length` and `data.max_response_length` set the limits.",
    ),
    none(ROLLOUT, "calculate_log_probs logprobs_mode", "The sampler's log-probs are always recorded."),
    made(
        f"{TURNS}.enable",
        "`actor.max_turns`, `actor.tools`",
        False,
        "If false, an episode has one turn and no tools, unless `agent.default_agent_loop` is `tool_agent`.",
        _turns,
    ),
    used(
        f"{TURNS}.max_assistant_turns",
        "`actor.max_turns`",
        None,
        f"The same value. If no key gives a number of turns, `actor.max_turns` is {UNBOUNDED_TURNS}.",
    ),
    used(
        f"{TURNS}.max_user_turns",
        "`actor.max_user_turns`",
        None,
        "The same value, if there are interactions. It also becomes `actor.max_turns` if `max_assistant_turns` and "
        "`max_turns` are null, except with an agent loop of yours.",
    ),
    used(f"{TURNS}.max_turns", "`actor.max_turns`", None, "An older name of `max_assistant_turns`."),
    used(
        f"{TURNS}.tool_config_path",
        "`actor.verl_tools`",
        None,
        "The classes in the file are used unchanged, if the packages that they import are installed. verl's sandbox "
        "tool becomes `python`, verl's search tool `search`, and the file's MCP servers become `actor.mcp_servers`.",
    ),
    used(
        f"{TURNS}.function_tool_path",
        "`actor.verl_tools`",
        None,
        "The functions in the file are used unchanged.",
    ),
    used(f"{TURNS}.max_tool_response_length", "`actor.max_tool_chars`", 256, "The same value; both count characters."),
    used(
        f"{TURNS}.format",
        "`actor.tool_call_format`",
        "hermes",
        "asyncrl's name of the format; one that asyncrl lacks becomes `auto`.",
    ),
    *(
        used(
            f"{TURNS}.{name}",
            "`actor.agent_options`",
            None,
            f"Only agent loops of yours read it. In all other episodes, {without}",
        )
        for name, without in WITHOUT_LOOPS.items()
    ),
    used(
        f"{TURNS}.interaction_config_path",
        "`actor.interactions`",
        None,
        "The classes in the file are used unchanged, if the packages that they import are installed.",
    ),
    none(
        TURNS,
        "use_inference_chat_template tokenization_sanity_check_mode num_repeat_rollouts "
        "completion_callback tokenization_mode enable_tokenization_sanity_check",
        "Each turn continues the exact tokens of the turns before it; `actor.history` changes that.",
    ),
    made(
        f"{VALIDATION}.n",
        "`learner.eval_attempts`",
        1,
        "A single attempt is greedy; several attempts are sampled at `actor.temperature`.",
        _validation,
    ),
    used(f"{VALIDATION}.do_sample", "`learner.eval_attempts`", False, "One attempt is greedy, several are sampled."),
    used(f"{VALIDATION}.temperature", "`actor.temperature`", 0, "Evaluation uses `actor.temperature`."),
    used(f"{VALIDATION}.top_p", "", 1.0, "Evaluation samples from the whole distribution."),
    used(f"{VALIDATION}.top_k", "", -1, "It is treated like `top_p`."),
    none(
        ROLLOUT,
        "cudagraph_capture_sizes free_cache_engine data_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens enable_chunked_prefill load_format layered_summon disable_log_stats dtype "
        "quantization quantization_config_file engine_kwargs.* skip_tokenizer_init limit_images mtp mtp.* qat qat.* "
        "disaggregation.* seed full_determinism",
        "`engine.server.arguments` takes SGLang's own options.",
    ),
    none(
        ROLLOUT,
        "mode do_sample ignore_eos over_sample_rate",
        "Episodes always run asynchronously. Turns are sampled, and end with the model's end-of-turn token. "
        "`replay.oversample` starts more episodes than a batch needs.",
    ),
    none(
        ROLLOUT,
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu",
        "Log-probs are computed in passes of `learner.micro_tokens`.",
    ),
    made(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        "`engine.return_routed_experts`",
        False,
        "The same value, but always true if `actor_rollout_ref.actor.router_replay.mode` is `R3`.",
        _routed_experts,
    ),
    used(
        LOOP,
        "`actor.agent`, `actor.agent_options`",
        "single_turn_agent",
        "If the loop is yours, it becomes `actor.agent=verl`. `single_turn_agent` and `tool_agent` set no agent: "
        "asyncrl plays these episodes itself.",
    ),
    used(
        f"{AGENT}.agent_loop_config_path",
        "`actor.agent`, `actor.agent_options`",
        None,
        "Sets `actor.agent=verl`. The agent gets the unchanged file, and the keys of `multi_turn` that agent loops "
        "read.",
    ),
    none(ROLLOUT, "agent.*", "The loops run in the actors."),
    none(
        ROLLOUT,
        "checkpoint_engine.* update_weights_bucket_megabytes",
        "Weights take the fastest route to the servers; `weights.to_engines` and `weights.into_servers` can choose "
        "another one.",
    ),
    none(
        ROLLOUT,
        "multi_stage_wake_up router_config_path moe_load_balance_metrics_interval "
        "profiler.* trace.* prometheus.* custom.*",
        "asyncrl has no such settings; see `observe.*` and docs/metrics.md.",
    ),
)
