"""Translates the keys of verl's section `data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl.compat.rows import Row, Setting, at_home, dotted, made, none, same, used
from asyncrl.compat.verl.configuration.async_rows import BATCH, PROMPTS, is_fully_async, prompts_of_step
from asyncrl.compat.verl.configuration.named_files import wrong_object
from asyncrl.compat.verl.configuration.source import VerlConfig

TRAIN = "data.train_files"
EVAL = "data.val_files"
GENERATED = "data.gen_batch_size"
PROMPT = "data.max_prompt_length"
TEMPLATE = "data.apply_chat_template_kwargs"
RESPONSE = "data.max_response_length"
FILTER = "algorithm.filter_groups"
MEMBERS = "actor_rollout_ref.rollout.n"


def _files(key: str, here: str) -> Row:
    def files(source: VerlConfig) -> Iterator[Setting | str]:
        named = source[key]
        named = [named] if isinstance(named, str) else named
        if named:
            yield here, [at_home(each) for each in named]
            if not source.says(key):
                yield f"{key} is not given: {here} is set to verl's default"

    default = f"~/data/rlhf/gsm8k/{'train' if key == TRAIN else 'test'}.parquet"
    return made(key, f"`{here}`", default, "One file or a list; `~` becomes the home folder.", files)


_LIMIT = "The same number; a negative one becomes null. The tasks are evenly spread over the rows, not drawn at random."


def _limit(there: str, here: str) -> Callable[[VerlConfig], Iterator[Setting | str]]:
    def limit(source: VerlConfig) -> Iterator[Setting | str]:
        if (source[there] or -1) > 0:
            yield here, source[there]

    return limit


def _batch(source: VerlConfig) -> Iterator[Setting | str]:
    members, prompts, updated = source[MEMBERS], prompts_of_step(source), source[PROMPTS]
    if min(members, updated) < 1:
        raise ValueError(f"{MEMBERS}={members} and {PROMPTS}={updated} must be 1 or more")
    batch = prompts * members
    yield "learner.batch_size", batch
    yield "learner.group_size", members
    wanted = max(1, -(-prompts // updated))
    updates = next(each for each in range(wanted, 0, -1) if batch % each == 0)
    yield "learner.minibatches", updates
    if is_fully_async(source):
        yield (
            f"{BATCH}={source[BATCH]}: not used with async_training; a step trains ppo_mini_batch_size * "
            f"require_batches = {prompts} prompts, as in verl"
        )
    elif prompts % updated or updates != wanted:
        yield (
            f"{PROMPTS}={updated} does not divide {BATCH}={prompts}: each step has {updates} updates of "
            f"{batch // updates} trajectories"
        )


def _oversample(source: VerlConfig) -> Iterator[Setting | str]:
    generated = source[GENERATED]
    if not generated or is_fully_async(source):
        return
    prompts = prompts_of_step(source)
    if source[f"{FILTER}.enable"] and generated > prompts:
        yield "replay.oversample", generated / prompts
    elif not source[f"{FILTER}.enable"]:
        yield (
            f"{GENERATED}={generated}: left out, so a step trains {BATCH}={prompts} prompts. Without filter_groups, a "
            f"step of earlier releases of verl trains {generated}; for that, set learner.batch_size"
        )


def _lengths(source: VerlConfig) -> Iterator[Setting | str]:
    tokens = source[PROMPT] + source[RESPONSE]
    yield "actor.max_tokens", tokens
    yield "actor.max_turn_tokens", source[RESPONSE]
    yield "data.max_prompt_length", source[PROMPT]
    yield "engine.max_length", tokens


COLUMNS = {"prompt": "data.prompt_key", "data_source": "data.reward_fn_key", "images": "data.image_key"}
"""Maps each field of a task to verl's key that names the field's column."""
SHIPPED_COLUMNS = {"prompt": "prompt", "data_source": "data_source", "images": "images"}


def _columns(source: VerlConfig) -> Iterator[Setting | str]:
    if source["data.custom_cls.path"]:
        return  # The class reads the files itself.
    named = {field: source[key] for field, key in COLUMNS.items() if source[key] not in (None, SHIPPED_COLUMNS[field])}
    if named:
        yield "data.columns", named


def _own_class(source: VerlConfig) -> Iterator[Setting | str]:
    path, name = source["data.custom_cls.path"], source["data.custom_cls.name"]
    if path:
        name = name or "CustomDataset"
        yield "data.dataset", dotted(path, name)
        yield from wrong_object("data.custom_cls.path", path, "data.custom_cls.name", name)


def _template(source: VerlConfig) -> Iterator[Setting | str]:
    yield "actor.template_kwargs", source.below(TEMPLATE)


ROWS = (
    _files(TRAIN, "data.train"),
    _files(EVAL, "data.eval"),
    made(
        BATCH,
        "`learner.batch_size`, `learner.group_size`, `learner.minibatches`",
        1024,
        "`learner.batch_size` counts trajectories: it is `train_batch_size * rollout.n`. `learner.group_size` is "
        "`rollout.n`. A step has `train_batch_size / ppo_mini_batch_size` minibatches.",
        _batch,
    ),
    made(
        GENERATED,
        "`replay.oversample`",
        None,
        "With `filter_groups`: `gen_batch_size / train_batch_size`, if this is above 1. Otherwise the key is left out: "
        "a step trains `train_batch_size` prompts.",
        _oversample,
    ),
    used(
        PROMPT,
        "`data.max_prompt_length`, `actor.max_tokens`",
        512,
        "The same value; `actor.max_tokens` is this value plus `max_response_length`.",
    ),
    made(
        RESPONSE,
        "`actor.max_tokens`, `actor.max_turn_tokens`, `engine.max_length`",
        512,
        "A turn may have `max_response_length` tokens, and a sequence `max_prompt_length + max_response_length`. Tool "
        "results are part of the sequence, as in verl.",
        _lengths,
    ),
    same("data.truncation", "data.truncation", "error"),
    same("data.filter_overlong_prompts", "data.filter_overlong", False),
    made("data.prompt_key", "`data.columns`", "prompt", "The entry `prompt`: the column with the prompt.", _columns),
    used("data.reward_fn_key", "`data.columns`", "data_source", "The entry `data_source`: the column with the source."),
    used(
        "data.image_key",
        "`data.columns`",
        "images",
        "The entry `images`: the column with the images (docs/data.md#rows).",
    ),
    same("data.shuffle", "data.shuffle", True),
    same("data.seed", "run.seed", None, "The same value; it seeds the whole run."),
    made(
        "data.custom_cls.path",
        "`data.dataset`, `data.dataset_params`",
        None,
        "The path of the class: `NAME` in `a/b.py` becomes `a.b.NAME`, and in `/a/b.py` it becomes `/a/b.py:NAME`. "
        "Keys of `data` that verl does not define become `data.dataset_params`.",
        _own_class,
    ),
    used("data.custom_cls.name", "`data.dataset`", None, "The name of the class."),
    used(
        "data.trust_remote_code",
        "`model.trust_remote_code`",
        False,
        "True if this or `model.trust_remote_code` is true.",
    ),
    Row(
        (f"{TEMPLATE}.*",),
        "`actor.template_kwargs`",
        "The same values.",
        _template,
    ),
    made("data.train_max_samples", "`data.limit`", -1, _LIMIT, _limit("data.train_max_samples", "data.limit")),
    made("data.val_max_samples", "`data.eval_limit`", -1, _LIMIT, _limit("data.val_max_samples", "data.eval_limit")),
    none(
        "data",
        "tokenizer use_shm val_batch_size return_raw_input_ids return_raw_chat return_full_prompt "
        "dataloader_num_workers filter_overlong_prompts_workers validation_shuffle return_multi_modal_inputs "
        "tool_config_path function_tool_path",
        "The replay hands out one task at a time, so there is no data loader. The tokenizer comes from `model.path`, "
        "and `actor.tools` names the tools.",
    ),
    none(
        "data",
        "video_key audio_key image_patch_size mm_processor_kwargs.*",
        "The model's own processor reads images. Videos and sounds are not supported (docs/models.md).",
    ),
    none("data.sampler", "class_path class_name", "Use `data.weights` or `data.band`."),
    none("data.datagen", "path name", "A run does not generate tasks."),
)
