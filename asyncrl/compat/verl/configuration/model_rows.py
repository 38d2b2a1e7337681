"""Translates the keys of verl's section `actor_rollout_ref.model`: folders, adapters, attention and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from asyncrl.compat.rows import Row, Setting, at_home, made, none, used
from asyncrl.compat.verl.configuration.source import VerlConfig

MODEL = "actor_rollout_ref.model"
MIXTURE = "moe_freeze_all"
FREEZES_MIXTURE = (f"{MODEL}.override_config.{MIXTURE}", f"{MODEL}.{MIXTURE}")
"""The two places of a key that only a fork of verl has. The first place wins."""
ATTENTION = {"flash_attention_2": "flash_attention_2", "sdpa": "sdpa", "flex_attention": "flex_attention"}
LORA = f"{MODEL}.lora"
MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc1_gate": ("gate_proj",),
}
"""Maps each layer of Megatron to the same layers of Hugging Face's models. Megatron fuses some of them."""
FUSED_LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
LORA_TYPES = (None, "lora", "canonical_lora")
LAYER_NAME = re.compile(r"[\w.-]+")


def path_row(key: str, here: str, default: str, wanted: Callable[[VerlConfig], bool] = lambda source: True) -> Row:
    """A row for the path of a model. If `wanted` is false for a configuration, the row makes no setting."""

    def path(source: VerlConfig) -> Iterator[Setting | str]:
        if not wanted(source) or source[key] is None:
            return
        yield here, at_home(source[key])
        if not source.says(key):
            yield f"{key} is not given: {here} is set to verl's default"

    return made(key, f"`{here}`", default, "A folder or a name on the hub; `~` becomes the home folder.", path)


def _remote_code(source: VerlConfig) -> Iterator[Setting | str]:
    yield "model.trust_remote_code", bool(source[f"{MODEL}.trust_remote_code"] or source["data.trust_remote_code"])


def _given(name: str, here: str) -> Callable[[VerlConfig], Iterator[Setting | str]]:
    def value(source: VerlConfig) -> Iterator[Setting | str]:
        if source[f"{MODEL}.{name}"] is not None:
            yield here, at_home(source[f"{MODEL}.{name}"])

    return value


def _recompute(source: VerlConfig) -> Iterator[Setting | str]:
    if not source[f"{MODEL}.enable_gradient_checkpointing"]:
        yield "model.activations", 1.0


def attention_of(source: VerlConfig) -> str | None:
    """The attention that the configuration names for the policy; None if it names none."""
    changes = source.below(f"{MODEL}.override_config")
    return changes.get("attn_implementation") or changes.get("model_config.attn_implementation")


def has_adapters(source: VerlConfig) -> bool:
    """True if the policy gets adapters."""
    return any(
        source[f"{MODEL}.{name}"] for name in ("lora_rank", "lora_adapter_path", "lora.rank", "lora.adapter_path")
    )


def _attention(source: VerlConfig) -> Iterator[Setting | str]:
    changes = source.below(f"{MODEL}.override_config")
    implementation = attention_of(source)
    for name in (MIXTURE, "attn_implementation", "model_config.attn_implementation"):
        changes.pop(name, None)
    if implementation in ATTENTION:
        yield "model.attention", ATTENTION[implementation]
    elif implementation:
        yield f"{MODEL}.override_config.attn_implementation={implementation}: model.attention is auto"
    given = {name.removeprefix("model_config."): value for name, value in changes.items() if value not in (None, {})}
    if given:
        yield "model.override_config", given


def _lora(source: VerlConfig) -> Iterator[Setting | str]:
    folder = source[f"{MODEL}.lora_adapter_path"] or source[f"{LORA}.adapter_path"]
    if folder is not None or source[f"{MODEL}.lora_rank"]:
        yield from adapters(source, MODEL, "model.lora", folder)
    elif rank := source[f"{LORA}.rank"]:
        yield "model.lora.rank", rank
        yield "model.lora.alpha", source[f"{LORA}.alpha"]
        yield from _targets(source, f"{LORA}.target_modules", "model.lora.targets")
    if source[f"{LORA}.dropout"]:
        yield f"{LORA}.dropout={source[f'{LORA}.dropout']}: adapters have no dropout here"
    if source.values.get(f"{LORA}.type") not in LORA_TYPES:
        yield f"{LORA}.type={source[f'{LORA}.type']}: adapters are plain LoRA here"


def adapters(source: VerlConfig, section: str, here: str, folder: str | None) -> Iterator[Setting | str]:
    """Yield the LoRA settings below the key `here` for the model of verl's `section`. The adapters come from `folder`;
    None: they are new."""
    if folder is not None:
        yield f"{here}.path", at_home(folder)
        return
    yield f"{here}.rank", source[f"{section}.lora_rank"]
    yield f"{here}.alpha", source[f"{section}.lora_alpha"]
    yield from _targets(source, f"{section}.target_modules", f"{here}.targets")


def _targets(source: VerlConfig, key: str, here: str) -> Iterator[Setting | str]:
    given = source[key]
    names = [given] if isinstance(given, str) else list(given)
    if unclear := [name for name in names if not LAYER_NAME.fullmatch(str(name))]:
        yield f"{key}={unclear[0]}: patterns are not read, so all linear layers get adapters; name layers in {here}"
        return
    yield here, [name for each in names for name in MEGATRON_LAYERS.get(each, (each,))]


ROWS = (
    path_row(f"{MODEL}.path", "model.path", "~/models/deepseek-llm-7b-chat"),
    made(
        f"{MODEL}.trust_remote_code",
        "`model.trust_remote_code`",
        False,
        "True if this or `data.trust_remote_code` is true.",
        _remote_code,
    ),
    made(
        f"{MODEL}.enable_gradient_checkpointing",
        "`model.activations`",
        True,
        "True leaves asyncrl's default, which keeps as many activations as fit in memory. False keeps all activations.",
        _recompute,
    ),
    Row(
        (f"{MODEL}.override_config.*",),
        "`model.override_config`, `model.attention`",
        "`attn_implementation` becomes `model.attention`, and `moe_freeze_all` (in a fork of verl) becomes "
        "`model.freeze=[verl_moe]`. All other fields become `model.override_config`.",
        _attention,
    ),
    used(
        f"{MODEL}.{MIXTURE}",
        "`model.freeze`",
        None,
        "In a fork of verl: the same as in `override_config`, which wins if both have it.",
    ),
    made(
        f"{MODEL}.lora_rank",
        "`model.lora`",
        0,
        "0 trains all weights. The adapters are merged into the weights that are pushed.",
        _lora,
    ),
    used(f"{MODEL}.lora_alpha", "`model.lora.alpha`", 16, "The same value."),
    used(
        f"{MODEL}.target_modules",
        "`model.lora.targets`",
        "all-linear",
        "The same value; one name becomes a list. A pattern becomes `all-linear`.",
    ),
    used(f"{MODEL}.lora_adapter_path", "`model.lora.path`", None, "Rank, alpha and targets are read from the folder."),
    used(f"{LORA}.rank", "`model.lora.rank`", 0, "As `lora_rank`, for Megatron."),
    used(f"{LORA}.alpha", "`model.lora.alpha`", 32, "The same value."),
    used(
        f"{LORA}.target_modules",
        "`model.lora.targets`",
        FUSED_LAYERS,
        "Megatron's fused layers become those of the Hugging Face model, such as `q_proj`.",
    ),
    used(f"{LORA}.adapter_path", "`model.lora.path`", None, "As `lora_adapter_path`."),
    used(f"{LORA}.dropout", "`model.lora`", 0.0, "Left out: adapters have no dropout. The report says so."),
    none(
        MODEL,
        "exclude_modules lora.*",
        "`model.lora.targets` names all layers that get adapters. Adapters are always merged into the pushed weights.",
    ),
    made(
        f"{MODEL}.custom_chat_template",
        "`model.chat_template`",
        None,
        "The text of the template.",
        _given("custom_chat_template", "model.chat_template"),
    ),
    made(
        f"{MODEL}.tokenizer_path",
        "`model.tokenizer`",
        None,
        "A folder or a name on the hub; `~` becomes the home folder.",
        _given("tokenizer_path", "model.tokenizer"),
    ),
    none(
        MODEL,
        "hf_config_path",
        "config.json in the model's folder is read; `model.override_config` changes its fields.",
    ),
    none(MODEL, "external_lib", "Give the dotted path of a class or function of yours in the key that uses it."),
    none(
        MODEL,
        "use_remove_padding use_shm use_liger use_fused_kernels fused_kernel_options.* enable_activation_offload "
        "tiled_mlp.* mtp.*",
        "Sequences are always packed without padding. The learner has its own settings for the rest "
        "(docs/training.md).",
    ),
)
