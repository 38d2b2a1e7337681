"""Translates the keys of TRL for the model, its adapters and the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.compat.rows import Row, Setting, made, none, same, used
from asyncrl.compat.trl.source import TrlConfig
from asyncrl.compat.trl.values import Named, ScriptRows, rows_of, split_of

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "torch.float16"), "float16"),
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "float32"),
}
ATTENTION = ("flash_attention_2", "sdpa", "flex_attention")
_IN_INIT = ("attn_implementation", "dtype", "torch_dtype", "revision", "trust_remote_code")
_NONE_IN_INIT = ("device_map", "use_cache", "low_cpu_mem_usage")
"""Arguments of `from_pretrained` that need no counterpart."""
_OF_MIXTURE = frozenset(("columns", "fraction"))
"""Keys of a data set of a mixture, in addition to the arguments of `load_dataset`."""


def text(value: Any) -> Any:
    """The value. In place of a function or class that the script names, its dotted path."""
    return value.path if isinstance(value, Named) else value


def _init(source: TrlConfig) -> Mapping[str, Any]:
    given = source["model_init_kwargs"]
    return given if isinstance(given, Mapping) else {}


def _path(source: TrlConfig) -> Iterator[Setting | str]:
    path = text(source["model"] or source["model_name_or_path"])
    if isinstance(path, str):
        yield "model.path", path
    else:
        yield "model: no name of a model is given; set model.path"
    revision = source["model_revision"] or _init(source).get("revision")
    if revision not in (None, "main"):
        yield "model.revision", revision
    if source["trust_remote_code"] or _init(source).get("trust_remote_code"):
        yield "model.trust_remote_code", True


def _rest_of_init(source: TrlConfig) -> Iterator[Setting | str]:
    for name, value in _init(source).items():
        if name not in (*_IN_INIT, *_NONE_IN_INIT):
            yield f"model_init_kwargs.{name}={text(value)}: left out; model.override_config sets fields of config.json"


def _attention(source: TrlConfig) -> Iterator[Setting | str]:
    given = text(source["attn_implementation"] or _init(source).get("attn_implementation"))
    if given in ATTENTION:
        yield "model.attention", given
    elif given is not None:
        yield f"attn_implementation={given}: model.attention is auto"


def _dtype(source: TrlConfig) -> Iterator[Setting | str]:
    given = text(
        source["dtype"] or source["torch_dtype"] or _init(source).get("dtype") or _init(source).get("torch_dtype")
    )
    if source["fp16"]:
        yield "model.dtype", "float16"
    elif source["bf16"] is not False:
        yield "model.dtype", "bfloat16"
    else:
        yield "model.dtype", DTYPES.get(str(given), "float32")


def _recompute(source: TrlConfig) -> Iterator[Setting | str]:
    if source["gradient_checkpointing"] is False:
        yield "model.activations", 1.0


def _balance(source: TrlConfig) -> Iterator[Setting | str]:
    if source["router_aux_loss_coef"] is not None:
        yield "algorithm.balance_weight", source["router_aux_loss_coef"]


def _lora(source: TrlConfig) -> Iterator[Setting | str]:
    if not source["use_peft"]:
        return
    yield "model.lora.rank", source["lora_r"]
    yield "model.lora.alpha", source["lora_alpha"]
    yield "model.lora.rslora", bool(source["use_rslora"])
    targets = source["lora_target_modules"]
    if targets is None:
        yield "lora_target_modules is not given: peft chooses layers by the model's type, asyncrl all linear layers"
    else:
        yield "model.lora.targets", [targets] if isinstance(targets, str) else list(targets)
    if source["lora_dropout"]:
        yield f"lora_dropout={source['lora_dropout']}: adapters have no dropout here"


def _train(source: TrlConfig) -> Iterator[Setting | str]:
    yield from _rows(source, "train_dataset", "data.train", source["dataset_train_split"])


def _eval(source: TrlConfig) -> Iterator[Setting | str]:
    if source["eval_strategy"] not in (None, "no") or source["eval_dataset"] is not None:
        yield from _rows(source, "eval_dataset", "data.eval", source["dataset_test_split"])


def _rows(source: TrlConfig, key: str, ours: str, split: str) -> Iterator[Setting | str]:
    rows = source[key]
    if isinstance(rows, str):
        yield ours, [rows]
        return
    if not isinstance(rows, ScriptRows) and source["dataset_name"]:
        rows = rows_of({"path": source["dataset_name"], "name": source["dataset_config"], "split": split})
    elif not isinstance(rows, ScriptRows) and source["datasets"]:
        yield from _mixture(source, ours)
        return
    if not isinstance(rows, ScriptRows):
        yield f"{key}: its rows are not known; set {ours} to files or to hub:OWNER/NAME?split={split}"
    elif not rows.source or rows.changes:
        made_by = f"changes rows by .{'(), .'.join(rows.changes)}()" if rows.changes else "makes the rows itself"
        file = f"{ours[5:]}.parquet"
        write = f"{rows.expression or key}.to_parquet('{file}')"
        yield f"{key}: the script {made_by}: write them once, by {write}, and set {ours}={file}"
        yield ours, [file]
    else:
        found = split_of(rows, split)
        # The experiment file needs no quotes around `hub:NAME?split=SPLIT`. Only a command line does.
        yield ours, [found.source]


def _mixture(source: TrlConfig, ours: str) -> Iterator[Setting | str]:
    if ours == "data.eval":
        yield "datasets: the mixture is for training only; set data.eval, or learner.eval_every=0"
        return
    names: list[str] = []
    for each in map(dict, source["datasets"]):
        arguments = {"split": "train", **{key: value for key, value in each.items() if key not in _OF_MIXTURE}}
        rows = rows_of(arguments)
        if rows.source:
            names.append(rows.source)
        else:
            yield (
                f"datasets: {each.get('path')} is left out, since no source of asyncrl has its rows "
                f"({', '.join(f'{key}={value}' for key, value in arguments.items() if key != 'path')}): write them to "
                f"a file, and add it to {ours}"
            )
        if left := sorted(each.keys() & _OF_MIXTURE):
            yield f"datasets: {', '.join(left)} of {each.get('path')} are left out; data.weights weighs data sources"
    yield ours, names


def _shuffle(source: TrlConfig) -> Iterator[Setting | str]:
    yield "data.shuffle", bool(source["shuffle_dataset"])


def _template(source: TrlConfig) -> Iterator[Setting | str]:
    if source["chat_template_kwargs"]:
        yield "actor.template_kwargs", dict(source["chat_template_kwargs"])


ROWS: tuple[Row, ...] = (
    made("model", "`model.path`", None, "A folder or a name on the hub.", _path),
    used("model_name_or_path", "`model.path`", None, "The same as `model`, on TRL's command line."),
    used("model_revision", "`model.revision`", "main", "The same value."),
    used("trust_remote_code", "`model.trust_remote_code`", False, "The same value."),
    made(
        "model_init_kwargs",
        "`model.path`, `model.dtype`, `model.attention`",
        None,
        "`revision`, `dtype`, `attn_implementation` and `trust_remote_code` are used. The report names all others.",
        _rest_of_init,
    ),
    made("attn_implementation", "`model.attention`", None, "A kind that asyncrl lacks becomes `auto`.", _attention),
    made(
        "bf16",
        "`model.dtype`",
        None,
        "The dtype of forward and backward passes: bfloat16, as in TRL, unless this is false. Weights are float32.",
        _dtype,
    ),
    used("fp16", "`model.dtype`", False, "True becomes float16."),
    used("dtype", "`model.dtype`", None, "Used if `bf16` and `fp16` are false."),
    used("torch_dtype", "`model.dtype`", None, "An older name of `dtype`."),
    made(
        "gradient_checkpointing",
        "`model.activations`",
        True,
        "True leaves asyncrl's default, which keeps as many activations as fit in memory. False keeps all.",
        _recompute,
    ),
    made("router_aux_loss_coef", "`algorithm.balance_weight`", None, "The same value.", _balance),
    made("use_peft", "`model.lora`", False, "True, or a `LoraConfig` in the script, trains adapters.", _lora),
    used("lora_r", "`model.lora.rank`", 16, "The same value; a `LoraConfig` without `r` has 8."),
    used("lora_alpha", "`model.lora.alpha`", 32, "The same value; a `LoraConfig` without `lora_alpha` has 8."),
    used("use_rslora", "`model.lora.rslora`", False, "The same value."),
    used("lora_target_modules", "`model.lora.targets`", None, "The same list; null becomes `[all-linear]`."),
    used("lora_dropout", "`model.lora`", 0.05, "Left out: adapters have no dropout. The report says so."),
    used("lora_task_type", "`model.lora`", "CAUSAL_LM", "Adapters always belong to a causal language model."),
    made(
        "train_dataset",
        "`data.train`",
        None,
        "`load_dataset(NAME, CONFIG, split=SPLIT)` becomes `hub:NAME?config=CONFIG&split=SPLIT`, with `&revision=` if "
        "a revision is given. JSON and Parquet files stay files. Write the rows to a file first in three cases: the "
        "script changes rows (for example by `map`), loads only a part of a file (for example by "
        "`split='train[:90%]'`), or gives `data_dir`.",
        _train,
    ),
    made("eval_dataset", "`data.eval`", None, "As `train_dataset`.", _eval),
    used("dataset_name", "`data.train`, `data.eval`", None, "The data set on the hub."),
    used("dataset_config", "`data.train`, `data.eval`", None, "`config` in `hub:NAME?config=CONFIG`."),
    used("dataset_train_split", "`data.train`", "train", "`split` in `hub:NAME?split=SPLIT`."),
    used("dataset_test_split", "`data.eval`", "test", "`split` in `hub:NAME?split=SPLIT`."),
    used("datasets", "`data.train`", None, "Each data set of the mixture, without `fraction` and `columns`."),
    made("shuffle_dataset", "`data.shuffle`", True, "The same value.", _shuffle),
    made("chat_template_kwargs", "`actor.template_kwargs`", None, "The same keys.", _template),
    same(
        "max_prompt_length", "data.max_prompt_length", None, "The same value. Only older releases of TRL have this key."
    ),
    none("", "cast_lm_head_to_fp32", "`model.dtype` holds for the whole model, and log-probs are float32."),
    none("", "disable_dropout", "The learner always runs the model without dropout."),
    none("", "remove_unused_columns", "A reward function gets every column of the task."),
    none(
        "",
        "dataset_streaming streaming test_split_size ignore_bias_buffers",
        "`data.keep_in_memory=false` reads rows from a file. Name held-out tasks in `data.eval`. "
        "Buffers need no setting.",
    ),
    none(
        "",
        "peft_config peft_config.* lora_modules_to_save lora_target_parameters use_dora",
        "`model.lora` has rank, alpha, rslora, targets and path. All other weights are frozen.",
    ),
    none(
        "",
        "quantization_config load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        "The weights of the policy are not quantised. `model.lora` and `learner.optimizer=adamw_8bit` save memory.",
    ),
    none("", "processing_class", "`model.tokenizer` and `model.chat_template` replace those of the model's folder."),
)
