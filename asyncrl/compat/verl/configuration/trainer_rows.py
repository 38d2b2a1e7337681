"""Translates the keys of verl's section `trainer`, and lists the sections that have no counterpart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.compat.rows import Row, Setting, made, none, same, used
from asyncrl.compat.verl.configuration.actor_rows import STEPS
from asyncrl.compat.verl.configuration.async_rows import (
    TOTAL,
    is_fully_async,
    prompts_of_step,
    steps_a_version,
    total_steps,
)
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.config.schema import LearnerConfig

EPOCHS = "trainer.total_epochs"
NAME = "trainer.experiment_name"
DIR = "trainer.default_local_dir"
MOST_KEPT = 512
"""The largest value that observe.keep_evaluated may have."""
DEFAULT_CHECKPOINTS = LearnerConfig().checkpoint_every
LOGGERS = ("console", "wandb", "tensorboard", "trackio")


def _length(source: VerlConfig) -> Iterator[Setting | str]:
    if is_fully_async(source) and (steps := total_steps(source)):
        yield "learner.steps", steps
        yield (
            f"{TOTAL}={source[TOTAL]} counts prompts: learner.steps={steps} of {prompts_of_step(source)} prompts each. "
            f"verl also ends after {EPOCHS}={source[EPOCHS]}: set learner.steps lower if the data has fewer prompts"
        )
    elif source[STEPS] and not is_fully_async(source):
        yield "learner.steps", source[STEPS]
    else:
        yield "learner.epochs", source[EPOCHS]


def _name(source: VerlConfig) -> Iterator[Setting | str]:
    name = re.sub(r"[^\w.+=-]+", "-", str(source[NAME])).strip(".-") or "train"
    yield "run.name", name
    folder = Path(str(source[DIR])).expanduser()
    if source.says(DIR) and str(folder) != f"checkpoints/{source['trainer.project_name']}/{source[NAME]}":
        yield "run.dir", str(folder.parent if folder.name == str(source[NAME]) else folder)


def _loggers(source: VerlConfig) -> Iterator[Setting | str]:
    given = source["trainer.logger"]
    if not source.says("trainer.logger"):
        return
    named = [given] if isinstance(given, str) else list(given or [])
    yield "observe.sinks", [name for name in LOGGERS if name in named]
    if others := [name for name in named if name not in LOGGERS]:
        yield (
            f"trainer.logger: {', '.join(others)} left out; every role writes its metrics as JSON lines "
            "(docs/metrics.md)"
        )


def _checkpoints(source: VerlConfig) -> Iterator[Setting | str]:
    version = steps_a_version(source)
    if source["trainer.save_freq"] > 0:
        yield "learner.checkpoint_every", source["trainer.save_freq"] * version
    elif DEFAULT_CHECKPOINTS % version:
        # A checkpoint must be a published version.
        yield "learner.checkpoint_every", -(-DEFAULT_CHECKPOINTS // version) * version
    if source["trainer.max_actor_ckpt_to_keep"]:
        yield "learner.keep_checkpoints", source["trainer.max_actor_ckpt_to_keep"]


def _evaluations(source: VerlConfig) -> Iterator[Setting | str]:
    every = source["trainer.test_freq"]
    yield "learner.eval_every", max(0, every) * steps_a_version(source)
    if every > 0 and not source["trainer.val_before_train"]:
        yield "trainer.val_before_train=false: the first evaluation is always before step 1"
    if every <= 0 and source.says("trainer.val_before_train") and source["trainer.val_before_train"]:
        yield "trainer.val_before_train=true: without trainer.test_freq there is no evaluation; set learner.eval_every"


def _generations(source: VerlConfig) -> Iterator[Setting | str]:
    if count := source["trainer.log_val_generations"]:
        kept = min(count, MOST_KEPT)
        yield "observe.keep_evaluated", kept
        yield "observe.upload", ["episodes"]
        yield (
            f"trainer.log_val_generations={count}: services in observe.sinks, such as wandb, get a table of {kept} "
            "held-out episodes at each evaluation, and of the kept training episodes"
        )


def _kept(source: VerlConfig) -> Iterator[Setting | str]:
    states = {"trainer.rollout_data_dir": "trained", "trainer.validation_data_dir": "evaluated"}
    for key, state in states.items():
        if source[key]:
            yield "replay.retention", "all"
            yield (
                f"{key}: the store keeps all episodes; `asyncrl inspect export RUN --to DIR --state {state}` writes "
                "them as Parquet, with prompt, answer and rewards"
            )


def _resume(source: VerlConfig) -> Iterator[Setting | str]:
    mode = source["trainer.resume_mode"]
    if mode == "disable":
        yield "trainer.resume_mode=disable: a run of the same name is resumed; choose another run.name for a new run"
    if mode == "resume_path":
        path = source["trainer.resume_from_path"]
        yield (
            f"trainer.resume_mode=resume_path: a run cannot resume from verl's checkpoints ({path}); "
            "`asyncrl merge` turns a checkpoint into a folder for model.path"
        )


def _warmup(source: VerlConfig) -> Iterator[Setting | str]:
    if source["trainer.critic_warmup"]:
        yield "critic.warmup_steps", source["trainer.critic_warmup"]


ROWS = (
    made(
        STEPS,
        "`learner.steps`, `learner.epochs`",
        None,
        "A step trains on `train_batch_size` prompts, as in verl.",
        _length,
    ),
    used(EPOCHS, "`learner.epochs`", 30, "Used if `total_training_steps` is null."),
    same("trainer.project_name", "observe.project", "verl_examples"),
    made(
        NAME,
        "`run.name`, `run.dir`",
        "gsm8k",
        "Special characters become `-`.",
        _name,
    ),
    used(
        DIR,
        "`run.dir`",
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "The folder, without the run's name at its end. verl's default is not copied.",
    ),
    made(
        "trainer.logger",
        "`observe.sinks`",
        ["console", "wandb"],
        "Copied if your configuration sets it; loggers that asyncrl lacks are left out. Every role also writes its "
        "metrics as JSON lines.",
        _loggers,
    ),
    made(
        "trainer.save_freq",
        "`learner.checkpoint_every`",
        -1,
        "-1 leaves asyncrl's default, since a run needs checkpoints to resume.",
        _checkpoints,
    ),
    used("trainer.max_actor_ckpt_to_keep", "`learner.keep_checkpoints`", None, "null leaves asyncrl's default."),
    made("trainer.test_freq", "`learner.eval_every`", -1, "-1 becomes 0: no evaluation.", _evaluations),
    used(
        "trainer.val_before_train",
        "`learner.eval_every`",
        True,
        "If there are evaluations, the first one is always before step 1.",
    ),
    made(
        "trainer.resume_mode",
        "",
        "auto",
        "A run of the same name is always resumed, as with `auto`.",
        _resume,
    ),
    used(
        "trainer.resume_from_path",
        "",
        None,
        "A run cannot resume from verl's checkpoints; `asyncrl merge` turns a checkpoint into a folder for "
        "`model.path`.",
    ),
    made("trainer.critic_warmup", "`critic.warmup_steps`", 0, "The same value.", _warmup),
    made(
        "trainer.log_val_generations",
        "`observe.keep_evaluated`, `observe.upload`",
        0,
        f"The same number, at most {MOST_KEPT}: services such as wandb get a table of this many held-out episodes, and "
        "of the kept training episodes.",
        _generations,
    ),
    made(
        "trainer.rollout_data_dir",
        "`replay.retention`",
        None,
        "If this key is set, `replay.retention` is `all`: the store keeps every episode, and `asyncrl inspect export` "
        "writes them as Parquet.",
        _kept,
    ),
    used("trainer.validation_data_dir", "`replay.retention`", None, "As `rollout_data_dir`."),
    none("trainer", "val_only", "Use `asyncrl evaluate`."),
    none(
        "trainer",
        "balance_batch esi_redundant_time checkpoint_callback_class default_hdfs_dir del_local_ckpt_after_load "
        "max_critic_ckpt_to_keep ray_wait_register_center_timeout device use_v1 use_legacy_worker_impl",
        "asyncrl has no such settings. Batches are always balanced, and a checkpoint contains policy and critic.",
    ),
    Row(
        ("trainer.v1.*",),
        "",
        "Generation and training run at once, unless `replay.max_lag` is 0. They have GPUs of their own, or share them "
        "(`cluster.colocated`).",
    ),
    Row(("global_profiler.*",), "", "Use `observe.profile_steps` and `observe.memory_steps`."),
    Row(("ray_kwargs.*", "ray_init.*"), "", "Use `cluster.ray.*` with `cluster.launcher=ray`."),
    Row(("transfer_queue.*", "skip.*"), "", "The replay has its own queue."),
    Row(
        ("distillation.*",),
        "",
        "A run has no teacher model. In a script over asyncrl's operators (docs/verl.md), a worker of the role `ref` "
        "can hold one, and the stream `ref_kl` (`algorithm.stream`) trains towards it.",
    ),
    Row(
        ("hydra.*", "defaults", "model_engine", "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout"),
        "",
        "Only verl's own program needs these keys. The translation reads the keys of all of verl's training engines.",
    ),
)
