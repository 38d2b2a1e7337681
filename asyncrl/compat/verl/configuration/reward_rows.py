"""Translates the keys of verl's sections `reward`, `reward_model` and `custom_reward_function`.

It also translates the keys of process-reward managers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from asyncrl.compat.rows import Row, Setting, alias, at_home, dotted, in_file, made, none, part, used
from asyncrl.compat.verl.configuration.actor_rows import ESTIMATOR
from asyncrl.compat.verl.configuration.correction_rows import (
    OF_FUNCTION,
    OF_GROUPS,
    has_own_manager,
    judged_by_manager,
    judged_by_model,
)
from asyncrl.compat.verl.configuration.data_rows import FILTER, PROMPT, RESPONSE
from asyncrl.compat.verl.configuration.named_files import wrong_object
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.verl.rewards.process_keys import DTYPES, KEYS, SPLITS, WHOLE, ShapingKeys, defaults
from asyncrl.compat.verl.rewards.rate_limits import RequestLimits
from asyncrl.config.option import options

FUNCTION = "reward.custom_reward_function"
MANAGER = "reward.reward_manager.name"
MODEL = "reward.reward_model"
MANAGER_SOURCE, MODULE = "reward.reward_manager.source", "reward.reward_manager.module.path"
KWARGS = "reward.reward_kwargs"
BUFFER = f"{KWARGS}.overlong_buffer_cfg"
PRIME_PROCESSES = 8
LIMITS = (*(each.name for each in fields(RequestLimits)), "timeout")
"""The keys of `reward` that `rate_limited` reads."""
SHAPING = tuple(each.name for each in options(ShapingKeys))
"""Keys with the same name in the process-reward managers and in scoring.shaping."""
DEFAULTS = defaults("qwen_prm")
PRM_KEYS = tuple(DEFAULTS)
TOKENIZERS = ("tokenizer", "input_tokenizer")


def _manager(source: VerlConfig) -> Iterator[Setting | str]:
    name = source[MANAGER]
    if judged_by_model(source):
        return
    if has_own_manager(source):
        yield "scoring.manager.name", in_file(source[MODULE], name)
        yield from wrong_object(MODULE, source[MODULE], MANAGER, name)
        if params := source.below(KWARGS):
            yield "scoring.manager.params", _nested(params)
        yield (
            f"{MANAGER}={name}: a class with run_single finds reward_kwargs in config.reward; if it reads more of "
            "verl's configuration, put that into scoring.manager.params.config"
        )
        return
    if name in KEYS:
        yield from _process(source, name)
    elif name == "prime":
        yield "scoring.rule_processes", PRIME_PROCESSES
    elif name == "remote":
        yield "scoring.rule_processes", source["reward.num_workers"]
    elif name in OF_GROUPS:
        yield "scoring.manager.name", name
        if params := _params(source, name):
            yield "scoring.manager.params", params
    elif name not in ("naive", "dapo", None):
        yield (
            f"{MANAGER}={name}: asyncrl lacks this manager; name a class of yours by its dotted path in "
            "scoring.manager.name, or in verl's words by reward.reward_manager.source=importlib"
        )
    yield from _overlong(source)


def _params(source: VerlConfig, name: str) -> dict[str, Any]:
    if name == "gdpo":
        return {"config": {"trainer": {"experiment_name": source["trainer.experiment_name"]}}}
    limits = {each: source[f"reward.{each}"] for each in LIMITS} if name == "rate_limited" else {}
    return {each: value for each, value in limits.items() if value is not None}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, given by dotted keys, as nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return nested


def _process(source: VerlConfig, family: str) -> Iterator[Setting | str]:
    given = {name: source[f"{KWARGS}.{name}"] for name in PRM_KEYS}
    yield "scoring.prm.family", family
    yield "actor.step_split", SPLITS[family]
    if given["prm_model_path"]:
        yield "scoring.prm.path", at_home(given["prm_model_path"])
    else:
        yield f"{KWARGS}.prm_model_path is not given: set scoring.prm.path to the process reward model"
    yield from _tokenizers(source)
    dtype = str(given["dtype"])
    yield "scoring.prm.dtype", DTYPES.get(dtype, DEFAULTS["dtype"])
    if dtype not in DTYPES:
        yield f"{KWARGS}.dtype={dtype}: {DEFAULTS['dtype']} is used; choose bfloat16, float16 or float32"
    device = str(given["device_map"])
    yield "scoring.prm.device", device if device.startswith(("cpu", "cuda")) else "auto"
    yield "scoring.prm.micro_inputs", given["prm_micro_batch_size"]
    yield "scoring.prm.micro_tokens", given["prm_micro_batch_size"] * (source[PROMPT] + source[RESPONSE])
    yield "scoring.shaping.outcome_weight", 0.0
    yield "scoring.shaping.process_weight", 1.0 if given["prm_aggregation"] in WHOLE else 0.0
    for name in SHAPING:
        yield f"scoring.shaping.{name}", given[name]
    applies_sigmoid = given["prm_apply_sigmoid"]
    if not source.says(f"{KWARGS}.prm_apply_sigmoid"):
        applies_sigmoid = defaults(family)["prm_apply_sigmoid"]
        yield "scoring.shaping.prm_apply_sigmoid", applies_sigmoid
    if not (applies_sigmoid or given["use_logit_tanh"]):
        yield "scoring.shaping.use_raw_logit", True
    yield from _aggregation(source, given["prm_aggregation"])


def _tokenizers(source: VerlConfig) -> Iterator[Setting | str]:
    own, policys = (source[f"{KWARGS}.{name}"] for name in TOKENIZERS)
    if own and own != source[f"{KWARGS}.prm_model_path"]:
        yield "scoring.prm.tokenizer", at_home(own)
    if policys and policys != source["actor_rollout_ref.model.path"]:
        yield f"{KWARGS}.input_tokenizer={policys}: the policy's text is decoded by the tokenizer of model.path"


def _aggregation(source: VerlConfig, given: str) -> Iterator[Setting | str]:
    by_step = given not in WHOLE
    yield "scoring.shaping.prm_aggregation", "per_step" if by_step else given
    if given == "best_of_n":
        yield "algorithm.reward", [part("best_of_n", weight=1.0)]
    if not by_step:
        return
    if source[ESTIMATOR] in ("grpo", "grpo_vectorized"):
        yield "algorithm.advantage", part("process_grpo", outcome_weight=0.0)
        yield f"{KWARGS}.prm_aggregation={given}: the advantage is process_grpo, which trains on step scores"
    elif source[ESTIMATOR] in ("gae", "reinforce_plus_plus"):
        yield "algorithm.advantage.params.step_weight", 1.0
    else:
        yield (
            f"{KWARGS}.prm_aggregation={given}: choose an advantage that trains on step scores, such as process_grpo "
            "or pure"
        )


def _overlong(source: VerlConfig) -> Iterator[Setting | str]:
    if not source[f"{BUFFER}.enable"]:
        return
    longest = source[f"{KWARGS}.max_resp_len"] if source.says(f"{KWARGS}.max_resp_len") else source[RESPONSE]
    buffer, weight = source[f"{BUFFER}.len"], source[f"{BUFFER}.penalty_factor"]
    if source[f"{FILTER}.metric"] in OF_FUNCTION:
        # These metrics leave the penalty out. So the learner adds it, after the replay has filtered the groups.
        yield "algorithm.reward", [part("overlong", max_length=longest, buffer=buffer, weight=weight)]
    else:
        yield "scoring.shaping.overlong_penalty", weight
        yield "scoring.shaping.overlong_max_length", longest
        yield "scoring.shaping.overlong_buffer", buffer


def _function(source: VerlConfig) -> Iterator[Setting | str]:
    path, name = source[f"{FUNCTION}.path"], source[f"{FUNCTION}.name"]
    of_manager = judged_by_manager(source)
    if judged_by_model(source):
        return
    if not path and of_manager:
        yield f"{FUNCTION}.path is null: name the manager's function in scoring.manager.compute_score, if it needs one"
        return
    if not path:
        yield "scoring.rules", {"openai/gsm8k": "gsm8k"}
        yield (
            f"{FUNCTION}.path is null: verl chooses a function by the data source. Here openai/gsm8k has the rule "
            "gsm8k, all other sources have exact_number; name other rules in scoring.rules (docs/scoring.md)"
        )
        return
    rule = dotted(path, name)
    yield from wrong_object(f"{FUNCTION}.path", path, f"{FUNCTION}.name", name)
    params = _nested(source.below(f"{FUNCTION}.reward_kwargs") | source.below("custom_reward_function.reward_kwargs"))
    if of_manager:
        yield "scoring.manager.compute_score", rule
        if params:
            yield "scoring.manager.compute_score_params", params
    else:
        yield "scoring.rule", [{"name": rule, "params": params}] if params else rule


def _outcome_model(source: VerlConfig) -> Iterator[Setting | str]:
    path = source[f"{MODEL}.model_path"]
    if judged_by_model(source):
        yield "scoring.rule", None
        if path:
            yield "scoring.outcome_model.path", at_home(path)
        yield "scoring.outcome_model.device", "auto"
        yield "scoring.outcome_model.dtype", "bfloat16"
        yield (
            f"{MODEL}.enable=true without {FUNCTION}.path: as in verl, the reward model alone judges, so scoring.rule "
            f"is null{'' if path else '; name the model in scoring.outcome_model.path'}"
        )
    elif path and source[f"{MODEL}.enable"]:
        yield (
            f"{MODEL}.enable=true: with your function or manager, the model adds nothing to the reward in verl, but "
            f"your code can ask it. asyncrl starts no server of {path}: start one, and give your function its address"
        )


def _prm_rows() -> Iterator[Row]:
    """The rows of the keys whose counterpart has the same name."""
    differs = {
        "prm_apply_sigmoid": "The same value. If it and `use_logit_tanh` are false, `scoring.shaping.use_raw_logit` is "
        "true.",
        "max_resp_len": "The same value. If you give it, it is also the limit of the penalty on long responses.",
    }
    for name in SHAPING:
        yield used(
            f"{KWARGS}.{name}", f"`scoring.shaping.{name}`", DEFAULTS[name], differs.get(name, "The same value.")
        )


ROWS = (
    made(
        f"{FUNCTION}.path",
        "`scoring.rule`, `scoring.manager.compute_score`",
        None,
        "The path of the function. With `batch`, `gdpo`, `rate_limited` or a manager of yours it becomes "
        "`scoring.manager.compute_score`. null gives the data source `openai/gsm8k` the rule `gsm8k`, and all others "
        "`exact_number`.",
        _function,
    ),
    used(f"{FUNCTION}.name", "`scoring.rule`", "compute_score", "The name of the function."),
    Row(
        (f"{FUNCTION}.reward_kwargs.*",),
        "`scoring.rule`, `scoring.manager.compute_score_params`",
        "The parameters `params` of the rule, or of the manager's function.",
    ),
    made(
        MANAGER,
        "`scoring.*`, `actor.step_split`",
        "naive",
        "`naive` and `dapo` set nothing; `prime` and `remote` set `scoring.rule_processes`. `qwen_prm` and "
        "`skywork_prm` set `scoring.prm` and `scoring.shaping`, so that process scores and bonuses are the whole "
        "reward. `batch`, `gdpo`, `rate_limited` and classes of yours become `scoring.manager.name`, and score whole "
        "groups.",
        _manager,
    ),
    used(MANAGER_SOURCE, "`scoring.manager.name`", "register", "`importlib` means a class of yours."),
    used(MODULE, "`scoring.manager.name`", None, "The file or module of your class: `FILE.py:NAME`."),
    used(
        f"{BUFFER}.enable",
        "`scoring.shaping.overlong_max_length`",
        False,
        "True enables the penalty on long responses. If `filter_groups.metric` is `acc` or `score`, it becomes the "
        "part `overlong` in `algorithm.reward`, which applies after the filter.",
    ),
    used(
        f"{BUFFER}.len",
        "`scoring.shaping.overlong_buffer`",
        512,
        "The penalty begins this many tokens before the limit.",
    ),
    used(f"{BUFFER}.penalty_factor", "`scoring.shaping.overlong_penalty`", 1.0, "The largest penalty."),
    none(BUFFER, "log", "Every score and penalty is recorded with its episode."),
    used(f"{KWARGS}.prm_model_path", "`scoring.prm.path`", None, "Only with `qwen_prm` and `skywork_prm`."),
    used(
        f"{KWARGS}.prm_aggregation",
        "`scoring.shaping.prm_aggregation`",
        DEFAULTS["prm_aggregation"],
        "`best_of_n` also sets `algorithm.reward`. `raw` becomes `per_step`, and changes the advantage: `grpo` becomes "
        "`process_grpo`, while `gae` and `reinforce_plus_plus` get `step_weight=1`.",
    ),
    used(
        f"{KWARGS}.prm_micro_batch_size",
        "`scoring.prm.micro_inputs`, `scoring.prm.micro_tokens`",
        DEFAULTS["prm_micro_batch_size"],
        "`micro_inputs` is this number. `micro_tokens` is this number times `max_prompt_length + max_response_length`.",
    ),
    used(f"{KWARGS}.dtype", "`scoring.prm.dtype`", DEFAULTS["dtype"], "The same value."),
    used(
        f"{KWARGS}.device_map",
        "`scoring.prm.device`",
        DEFAULTS["device_map"],
        "`cpu` and `cuda` are kept; other values become `auto`: one GPU for each scorer. If the model does not fit on "
        "one GPU, set `scoring.prm.gpus`.",
    ),
    used(
        f"{KWARGS}.tokenizer",
        "`scoring.prm.tokenizer`",
        None,
        "The reward model's tokenizer, if it is not in the model's folder.",
    ),
    *_prm_rows(),
    none(
        KWARGS,
        "input_tokenizer",
        "The policy's text is decoded by the tokenizer of `model.path`. The reward model then reads the text with its "
        "own template and tokenizer.",
    ),
    none(KWARGS, "use_shm", "Weights are mapped from their files, and the scorers of a host share one copy in memory."),
    none(KWARGS, "strategy", "A scorer holds a whole model, or spreads it over `scoring.prm.gpus`."),
    made(
        f"{MODEL}.enable",
        "`scoring.outcome_model.path`, `scoring.rule`",
        False,
        "True: only the sequence classifier at `model_path` judges, and `scoring.rule` is null. But if you name a "
        "function (`custom_reward_function`), only the function judges.",
        _outcome_model,
    ),
    used(f"{MODEL}.model_path", "`scoring.outcome_model.path`", None, "The model's folder or its name on the hub."),
    none(MODEL, "rollout.*", "A scorer runs the reward model itself; `cluster.*` places the scorers."),
    none(
        "reward",
        "reward_manager.module.* reward_loop_source reward_loop_module_path "
        "reward_loop_class_name launch_reward_fn_async",
        "`cluster.scorers` and `scoring.rule_processes` set the number of processes. `scoring.manager.name` takes the "
        "dotted path of a manager of yours.",
    ),
    none(
        "reward.sandbox_fusion",
        "url max_concurrent memory_limit_mb",
        "The rule `code` runs programs in the sandbox `actor.sandbox.kind`. To use a server as the sandbox, set "
        "`actor.sandbox.kind=http` and `actor.sandbox.url`.",
    ),
    used("reward.num_workers", "`scoring.rule_processes`", 8, "Only with `remote`."),
    *(
        used(f"reward.{name}", f"`scoring.manager.params.{name}`", None, "Only with `rate_limited`. The same value.")
        for name in LIMITS
    ),
    alias("reward_model.num_workers", "reward.num_workers"),
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
    *(alias(f"reward_model.reward_kwargs.{name}", f"{KWARGS}.{name}") for name in (*PRM_KEYS, *TOKENIZERS)),
    *(alias(f"reward_model.{name}", f"{KWARGS}.{name}") for name in (*PRM_KEYS, *TOKENIZERS)),
    Row(
        ("custom_reward_function.reward_kwargs.*",),
        "`scoring.rule`, `scoring.manager.compute_score_params`",
        "As `reward.custom_reward_function.reward_kwargs`.",
    ),
    none(
        "reward_model",
        "reward_loop_source reward_loop_module_path reward_loop_class_name launch_reward_fn_async "
        "micro_batch_size micro_batch_size_per_gpu max_length "
        "forward_max_token_len_per_gpu use_dynamic_bsz profiler.* rollout.* model.* sandbox_fusion.*",
        "`cluster.*` places the scorers, and `scoring.batch_tokens` limits their batches.",
    ),
    none(
        "sandbox_fusion",
        "url max_concurrent memory_limit_mb",
        "The rule `code` runs programs in the sandbox `actor.sandbox.kind`.",
    ),
)
