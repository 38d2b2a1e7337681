"""The keys of verl's sections `reward`, `reward_model` and `custom_reward_function`, and of its process rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.compat.verl.configuration.actor_rows import DTYPES, ESTIMATOR
from asyncrl.compat.verl.configuration.algorithm_rows import part
from asyncrl.compat.verl.configuration.data_rows import PROMPT, RESPONSE
from asyncrl.compat.verl.configuration.rows import Row, Setting, alias, at_home, dotted, found_from, made, none, used
from asyncrl.compat.verl.configuration.source import VerlConfig

FUNCTION = "reward.custom_reward_function"
MANAGER = "reward.reward_manager.name"
MODEL = "reward.reward_model"
KWARGS = "reward.reward_kwargs"
BUFFER = f"{KWARGS}.overlong_buffer_cfg"
PROCESS_MANAGERS = ("qwen_prm", "skywork_prm")
PRIME_PROCESSES = 8
AGGREGATIONS = ("mean_response", "pooled_last", "best_of_n", "min", "product")
SHAPING: Mapping[str, Any] = {
    "prm_apply_sigmoid": False,
    "use_logit_tanh": False,
    "tanh_tau": 2.0,
    "tanh_rmax": 1.0,
    "prm_acc_bonus_weight": 0.0,
    "enable_anti_hack": True,
    "stop_at_answer": True,
    "incorrect_answer_penalty": 0.0,
    "target_response_length": 400,
    "length_bonus_weight": 0.05,
    "max_resp_len": 1024,
}
"""Keys of the process-reward managers that scoring.shaping has under the same name, with their defaults there."""
PRM_KEYS = (*SHAPING, "prm_model_path", "prm_aggregation", "prm_micro_batch_size", "dtype", "device_map")
WITHOUT = ("tokenizer", "input_tokenizer", "use_shm", "strategy")


def _manager(source: VerlConfig) -> Iterator[Setting | str]:
    name = source[MANAGER]
    if name in PROCESS_MANAGERS:
        yield from _process(source, name)
    elif name == "prime":
        yield "scoring.rule_processes", PRIME_PROCESSES
    elif name == "batch":
        yield (
            f"{MANAGER}=batch: its function gets lists; name it for your data source: scoring.rules.SOURCE="
            "[{name: asyncrl.compat.verl.BatchRewardManager, params: {compute_score: DOTTED.PATH}}]"
        )
    elif name not in ("naive", "dapo", None):
        yield f"{MANAGER}={name}: asyncrl has no such manager; name a class by its dotted path in scoring.rule"
    yield from _overlong(source)


def _process(source: VerlConfig, family: str) -> Iterator[Setting | str]:
    given = {name: source[f"{KWARGS}.{name}"] for name in PRM_KEYS}
    yield "scoring.prm.family", family
    if given["prm_model_path"]:
        yield "scoring.prm.path", at_home(given["prm_model_path"])
    else:
        yield f"{KWARGS}.prm_model_path is not given: set scoring.prm.path to the process reward model"
    dtype = str(given["dtype"])
    yield "scoring.prm.dtype", "float16" if dtype in ("float16", "fp16") else DTYPES.get(dtype, "bfloat16")
    device = str(given["device_map"])
    yield "scoring.prm.device", device if device.startswith(("cpu", "cuda")) else "auto"
    yield "scoring.prm.micro_tokens", given["prm_micro_batch_size"] * (source[PROMPT] + source[RESPONSE])
    yield "scoring.shaping.outcome_weight", 0.0
    yield "scoring.shaping.process_weight", 1.0
    for name in SHAPING:
        yield f"scoring.shaping.{name}", given[name]
    if family == "skywork_prm" and not source.says(f"{KWARGS}.prm_apply_sigmoid"):
        yield "scoring.shaping.prm_apply_sigmoid", True
    yield from _aggregation(source, given["prm_aggregation"])


def _aggregation(source: VerlConfig, given: str) -> Iterator[Setting | str]:
    yield "scoring.shaping.prm_aggregation", given if given in AGGREGATIONS else "per_step"
    if given == "best_of_n":
        yield "algorithm.reward", [part("best_of_n", weight=1.0)]
    if given in AGGREGATIONS:
        return
    if source[ESTIMATOR] in ("grpo", "grpo_vectorized"):
        yield "algorithm.advantage", part("process_grpo", outcome_weight=0.0)
        yield f"{KWARGS}.prm_aggregation={given}: scores of steps train by the advantage process_grpo"
    elif source[ESTIMATOR] in ("gae", "reinforce_plus_plus"):
        yield "algorithm.advantage.params.step_weight", 1.0
    else:
        yield f"{KWARGS}.prm_aggregation={given}: choose an advantage that reads steps, such as process_grpo or pure"


def _overlong(source: VerlConfig) -> Iterator[Setting | str]:
    if not source[f"{BUFFER}.enable"]:
        return
    longest = source[f"{KWARGS}.max_resp_len"] if source.says(f"{KWARGS}.max_resp_len") else source[RESPONSE]
    buffer, weight = source[f"{BUFFER}.len"], source[f"{BUFFER}.penalty_factor"]
    if source["algorithm.filter_groups.metric"] == "acc":
        # Groups are compared before the learner changes the rewards.
        yield "algorithm.reward", [part("overlong", max_length=longest, buffer=buffer, weight=weight)]
    else:
        yield "scoring.shaping.overlong_penalty", weight
        yield "scoring.shaping.overlong_max_length", longest
        yield "scoring.shaping.overlong_buffer", buffer


def _function(source: VerlConfig) -> Iterator[Setting | str]:
    path, name = source[f"{FUNCTION}.path"], source[f"{FUNCTION}.name"]
    if not path:
        yield "scoring.rules", {"openai/gsm8k": "gsm8k"}
        yield (
            f"{FUNCTION}.path is null: verl chooses a function by the data source. openai/gsm8k has the rule gsm8k, "
            "others exact_number; name theirs in scoring.rules (docs/scoring.md)"
        )
        return
    rule = dotted(path, name)
    yield "scoring.rule", rule
    if place := found_from(path):
        yield f"{FUNCTION}.path={path}: {place}"
    params = source.below(f"{FUNCTION}.reward_kwargs") | source.below("custom_reward_function.reward_kwargs")
    if params:
        yield (
            f"{FUNCTION}.reward_kwargs={params}: only rules of a data source have parameters; use scoring.rules.SOURCE="
            f"[{{name: {rule}, params: {{...}}}}]"
        )


def _outcome_model(source: VerlConfig) -> Iterator[Setting | str]:
    if source[f"{MODEL}.enable"] and source[f"{MODEL}.model_path"]:
        yield "scoring.outcome_model.path", at_home(source[f"{MODEL}.model_path"])
        yield "scoring.outcome_model.device", "auto"
        yield "scoring.outcome_model.dtype", "bfloat16"


def _prm_rows() -> Iterator[Row]:
    for name, default in SHAPING.items():
        sentence = (
            "The same." if name != "max_resp_len" else "The same; the penalty on long responses counts from it too."
        )
        yield used(f"{KWARGS}.{name}", f"`scoring.shaping.{name}`", default, sentence)


ROWS = (
    made(
        f"{FUNCTION}.path",
        "`scoring.rule`",
        None,
        "The function by its dotted path. Without one, `openai/gsm8k` has the rule `gsm8k`, all others `exact_number`.",
        _function,
    ),
    used(f"{FUNCTION}.name", "`scoring.rule`", "compute_score", "The name of the function."),
    Row((f"{FUNCTION}.reward_kwargs.*",), "", "Only rules of `scoring.rules` take parameters; the report shows how."),
    made(
        MANAGER,
        "`scoring.*`",
        "naive",
        "`naive` and `dapo` need no key of their own, `prime` sets `scoring.rule_processes`; `qwen_prm` and "
        "`skywork_prm` are process reward models, whose scores are the whole reward. For `batch` the report says "
        "what to set.",
        _manager,
    ),
    used(
        f"{BUFFER}.enable",
        "`scoring.shaping.overlong_max_length`",
        False,
        "With `filter_groups.metric=acc` it is `overlong` of `algorithm.reward`, which comes after the filter.",
    ),
    used(f"{BUFFER}.len", "`scoring.shaping.overlong_buffer`", 512, "Tokens before the limit."),
    used(f"{BUFFER}.penalty_factor", "`scoring.shaping.overlong_penalty`", 1.0, "The largest penalty."),
    none(BUFFER, "log", "Every score and penalty is recorded with its episode."),
    used(f"{KWARGS}.prm_model_path", "`scoring.prm.path`", None, "Only with `qwen_prm` and `skywork_prm`."),
    used(
        f"{KWARGS}.prm_aggregation",
        "`scoring.shaping.prm_aggregation`",
        "mean_response",
        "`best_of_n` also goes into `algorithm.reward`. `raw` becomes `per_step`, with the advantage `process_grpo` in "
        "place of `grpo`, and `step_weight=1` for `gae` and `reinforce_plus_plus`.",
    ),
    used(
        f"{KWARGS}.prm_micro_batch_size",
        "`scoring.prm.micro_tokens`",
        8,
        "The tokens of so many sequences of the greatest length.",
    ),
    used(f"{KWARGS}.dtype", "`scoring.prm.dtype`", "bfloat16", "The same."),
    used(f"{KWARGS}.device_map", "`scoring.prm.device`", "auto", "`cpu` and `cuda` stay; all else is `auto`."),
    *_prm_rows(),
    none(KWARGS, " ".join(WITHOUT), "A process reward model reads its own text of each step, with its own tokenizer."),
    made(
        f"{MODEL}.enable",
        "`scoring.outcome_model.path`",
        False,
        "A model that scores whole episodes, as a sequence classifier.",
        _outcome_model,
    ),
    used(f"{MODEL}.model_path", "`scoring.outcome_model.path`", None, "The model's folder or its name on the hub."),
    none(MODEL, "enable_resource_pool n_gpus_per_node nnodes rollout.*", "Scorers run where `cluster.*` puts them."),
    none(
        "reward",
        "num_workers reward_manager.source reward_manager.module.* reward_loop_source reward_loop_module_path "
        "reward_loop_class_name launch_reward_fn_async",
        "`cluster.scorers` and `scoring.rule_processes` say how many score; a manager of yours is named in "
        "`scoring.rule` by its dotted path.",
    ),
    none(
        "reward.sandbox_fusion",
        "url max_concurrent memory_limit_mb",
        "The rule `code` runs programs in a sandbox on the scorer's machine.",
    ),
    *(alias(f"custom_reward_function.{name}", f"{FUNCTION}.{name}") for name in ("path", "name")),
    alias("reward_model.reward_manager", MANAGER),
    alias("reward_model.enable", f"{MODEL}.enable"),
    alias("reward_model.model.path", f"{MODEL}.model_path"),
    *(
        alias(f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}", f"{BUFFER}.{name}")
        for name in ("enable", "len", "penalty_factor", "log")
    ),
    *(
        alias(f"reward_model.overlong_buffer.{name}", f"{BUFFER}.{name}")
        for name in ("enable", "len", "penalty_factor", "log")
    ),
    *(alias(f"reward_model.reward_kwargs.{name}", f"{KWARGS}.{name}") for name in (*PRM_KEYS, *WITHOUT)),
    *(alias(f"reward_model.{name}", f"{KWARGS}.{name}") for name in (*PRM_KEYS, *WITHOUT)),
    Row(("custom_reward_function.reward_kwargs.*",), "", "Only rules of `scoring.rules` take parameters."),
    none(
        "reward_model",
        "num_workers enable_resource_pool n_gpus_per_node nnodes reward_loop_source reward_loop_module_path "
        "reward_loop_class_name launch_reward_fn_async micro_batch_size micro_batch_size_per_gpu max_length "
        "forward_max_token_len_per_gpu use_dynamic_bsz profiler.* rollout.* model.* sandbox_fusion.*",
        "Scorers run where `cluster.*` puts them, in batches of `scoring.batch_tokens`.",
    ),
    none(
        "sandbox_fusion", "url max_concurrent memory_limit_mb", "The rule `code` has a sandbox on the scorer's machine."
    ),
)
