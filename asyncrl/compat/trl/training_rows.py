"""Translates the keys of TRL for batches, steps, the optimizer, checkpoints and logs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.compat.rows import Row, Setting, made, none, same, used
from asyncrl.compat.trl.source import TrlConfig

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
SINKS = ("wandb", "tensorboard", "trackio")
PROCESSES = "num_processes"
"""The key of the number of processes. TRL's configuration lacks this key, since accelerate starts the processes. The
user may add it as KEY=VALUE."""


def _generated(source: TrlConfig) -> tuple[int, int]:
    """The numbers of completions of one generation and of one update."""
    in_pass = source["per_device_train_batch_size"] * source[PROCESSES]
    update = in_pass * source["gradient_accumulation_steps"]
    steps = source["steps_per_generation"]
    return source["generation_batch_size"] or (in_pass * steps if steps else update), update


def updates(source: TrlConfig) -> int:
    """The number of updates of one learner step. TRL counts updates as steps."""
    generated, update = _generated(source)
    return max(1, generated // update)


def _batch(source: TrlConfig) -> Iterator[Setting | str]:
    generated, update = _generated(source)
    yield "learner.batch_size", max(generated, update)
    yield "learner.group_size", source["num_generations"]
    yield "learner.minibatches", updates(source)
    if generated % update and update % generated:
        yield f"a generation has {generated} completions, an update {update}: a step has {updates(source)} updates"
    if not source.says(PROCESSES):
        yield f"{PROCESSES} is not known: the batch is that of one GPU; with 8 GPUs, translate again with {PROCESSES}=8"


def _again(source: TrlConfig) -> Iterator[Setting | str]:
    if (times := source["num_iterations"]) > 1:
        yield "replay.sampler.max_times_sampled", times
        yield f"num_iterations={times}: a group is trained in up to {times} batches, not several times in one step"


def longest(source: TrlConfig) -> int:
    """The maximum number of tokens of an episode, its prompt included."""
    prompt = source["max_prompt_length"] or 1024
    return int(source["vllm_max_model_length"] or source["max_completion_length"] + prompt)


def _lengths(source: TrlConfig) -> Iterator[Setting | str]:
    tokens = longest(source)
    yield "actor.max_turn_tokens", min(tokens, source["max_completion_length"])
    yield "actor.max_tokens", tokens
    yield "engine.max_length", tokens
    yield "learner.micro_tokens", source["per_device_train_batch_size"] * tokens
    if not source["vllm_max_model_length"] and not source["max_prompt_length"]:
        yield "TRL does not limit prompts: actor.max_tokens leaves 1024 tokens for a prompt; raise it for longer ones"
    if source["max_prompt_length"]:
        yield "data.truncation", "left"


def _steps(source: TrlConfig) -> Iterator[Setting | str]:
    if source["max_steps"] > 0:
        yield "learner.steps", math.ceil(source["max_steps"] / updates(source))
    else:
        yield "learner.epochs", source["num_train_epochs"]


def _optimizer(source: TrlConfig) -> Iterator[Setting | str]:
    given = str(source["optim"])
    yield "learner.optimizer", "adamw_8bit" if "8bit" in given else "muon" if given == "muon" else "adamw"
    if not given.startswith("adamw") and given != "muon":
        yield f"optim={given}: learner.optimizer is adamw"


def _betas(source: TrlConfig) -> Iterator[Setting | str]:
    yield "learner.betas", [source["adam_beta1"], source["adam_beta2"]]


def _schedule(source: TrlConfig) -> Iterator[Setting | str]:
    given = str(source["lr_scheduler_type"]).rpartition(".")[2].lower()
    yield "learner.schedule", SCHEDULES.get(given, "constant")
    if given not in SCHEDULES:
        yield f"lr_scheduler_type={given}: learner.schedule is constant; it may also be linear or cosine"
    options = dict(source["lr_scheduler_kwargs"] or {})
    floor = options.pop("min_lr_rate", None)
    if (lowest := options.pop("min_lr", None)) is not None:
        floor = lowest / source["learning_rate"]
    if floor is not None:
        yield "learner.lr_floor", floor
    if options:
        yield f"lr_scheduler_kwargs: {', '.join(sorted(options))} are left out"


def _warmup(source: TrlConfig) -> Iterator[Setting | str]:
    steps, share = source["warmup_steps"], source["warmup_ratio"]
    if steps and steps >= 1:
        yield "learner.warmup_steps", math.ceil(steps / updates(source))
    elif steps or share:
        yield "learner.warmup_steps", steps or share


def _norm(source: TrlConfig) -> Iterator[Setting | str]:
    if source["max_grad_norm"]:
        yield "learner.max_grad_norm", source["max_grad_norm"]
    else:
        yield f"max_grad_norm={source['max_grad_norm']}: gradients are always clipped, here at 1"


def _compile(source: TrlConfig) -> Iterator[Setting | str]:
    if source["torch_compile"]:
        yield "model.compile", True


def _evaluations(source: TrlConfig) -> Iterator[Setting | str]:
    strategy = str(source["eval_strategy"] or source["evaluation_strategy"] or "no").rpartition(".")[2].lower()
    if strategy == "steps":
        steps = source["eval_steps"] or source["logging_steps"]
        yield from _every("eval_steps", "learner.eval_every", steps, source)
    elif strategy == "epoch":
        yield "eval_strategy=epoch: evaluations come after a number of steps; set learner.eval_every"
    attempts = source["num_generations_eval"] or source["num_generations"]
    if strategy != "no":
        yield "learner.eval_attempts", attempts


def _checkpoints(source: TrlConfig) -> Iterator[Setting | str]:
    strategy = str(source["save_strategy"]).rpartition(".")[2].lower()
    if strategy == "steps":
        yield from _every("save_steps", "learner.checkpoint_every", source["save_steps"], source)
    else:
        yield f"save_strategy={strategy}: a run needs checkpoints, so learner.checkpoint_every has its default"
    if source["save_total_limit"]:
        yield "learner.keep_checkpoints", source["save_total_limit"]


def _every(key: str, ours: str, steps: float, source: TrlConfig) -> Iterator[Setting | str]:
    if 0 < steps < 1 and source["max_steps"] > 0:
        steps = steps * source["max_steps"]
    if steps < 1:
        yield f"{key}={steps}: a share of the steps; set {ours} to a number of steps"
    else:
        yield ours, max(1, round(steps / updates(source)))


def _best(source: TrlConfig) -> Iterator[Setting | str]:
    if source["load_best_model_at_end"]:
        yield "learner.keep_best", 1


def _folder(source: TrlConfig) -> Iterator[Setting | str]:
    folder = Path(str(source["output_dir"] or "trainer_output")).expanduser()
    name = "".join(
        each if each.isalnum() or each in "_.+=-" else "-" for each in str(source["run_name"] or folder.name)
    )
    yield "run.name", name.strip(".-") or "train"
    if str(folder.parent) != "." or source["run_name"]:
        yield "run.dir", str(folder.parent if folder.name == name or not source["run_name"] else folder)


def _sinks(source: TrlConfig) -> Iterator[Setting | str]:
    given = source["report_to"]
    names: Sequence[str] = [given] if isinstance(given, str) else list(given or [])
    known = [each for each in names if each in SINKS]
    if known:
        yield "observe.sinks", ["console", *known]
    if left := [each for each in names if each not in (*SINKS, "none", "all")]:
        yield f"report_to: {', '.join(left)} {'is' if len(left) == 1 else 'are'} left out (see observe.sinks)"


def _project(source: TrlConfig) -> Iterator[Setting | str]:
    if source.says("project"):
        yield "observe.project", source["project"]


def _kept(source: TrlConfig) -> Iterator[Setting | str]:
    if source.says("log_completions") and not source["log_completions"]:
        yield "observe.keep_episodes", 0


ROWS: tuple[Row, ...] = (
    made(
        "per_device_train_batch_size",
        "`learner.batch_size`, `learner.minibatches`, `learner.micro_tokens`",
        8,
        "`learner.batch_size` is the number of completions that TRL generates at once, or the number that it trains in "
        "one update, whichever is larger. `learner.minibatches` is the number of updates for each generation. "
        "`learner.micro_tokens` is this value times `actor.max_tokens`.",
        _batch,
    ),
    used("gradient_accumulation_steps", "`learner.batch_size`, `learner.minibatches`", 1, "As above."),
    used("generation_batch_size", "`learner.batch_size`, `learner.minibatches`", None, "As above."),
    used("steps_per_generation", "`learner.batch_size`, `learner.minibatches`", None, "As above."),
    used(
        PROCESSES,
        "`learner.batch_size`",
        1,
        "The number of GPUs. In TRL only accelerate knows it, so add it: `num_processes=8`.",
    ),
    used("num_generations", "`learner.group_size`", 8, "The same value."),
    made(
        "num_iterations",
        "`replay.sampler.max_times_sampled`",
        1,
        "The number of batches in which a group may be trained.",
        _again,
    ),
    made(
        "max_completion_length",
        "`actor.max_turn_tokens`, `actor.max_tokens`",
        512,
        "`actor.max_tokens` also has room for the prompt: `max_prompt_length`, or 1024 tokens. null means "
        "`vllm_max_model_length`, or else 512.",
        _lengths,
    ),
    made(
        "num_train_epochs",
        "`learner.epochs`",
        3.0,
        "The same value, if `max_steps` is not given.",
        _steps,
    ),
    used("max_steps", "`learner.steps`", -1, "Divided by the updates of a step, since TRL counts updates as steps."),
    same("learning_rate", "learner.lr", 1e-6),
    made(
        "optim",
        "`learner.optimizer`",
        "adamw_torch_fused",
        "Names with `8bit` become `adamw_8bit`, and `muon` stays `muon`. Any other name becomes `adamw`.",
        _optimizer,
    ),
    made("adam_beta1", "`learner.betas`", 0.9, "The first of the two.", _betas),
    used("adam_beta2", "`learner.betas`", 0.999, "The second of the two."),
    same("weight_decay", "learner.weight_decay", 0.0),
    made("max_grad_norm", "`learner.max_grad_norm`", 1.0, "0 becomes 1, since gradients are always clipped.", _norm),
    made(
        "lr_scheduler_type",
        "`learner.schedule`, `learner.lr_floor`",
        "linear",
        "A schedule other than constant, linear and cosine becomes `constant`.",
        _schedule,
    ),
    used("lr_scheduler_kwargs", "`learner.lr_floor`", None, "`min_lr_rate`, or `min_lr` divided by `learning_rate`."),
    made("warmup_steps", "`learner.warmup_steps`", 0, "The same number. Below 1 it is a share of all steps.", _warmup),
    used("warmup_ratio", "`learner.warmup_steps`", None, "A share of all steps; an older key."),
    made("torch_compile", "`model.compile`", False, "True is copied; false leaves asyncrl's default.", _compile),
    same("temperature", "actor.temperature", 1.0),
    same("seed", "run.seed", 42),
    same("full_determinism", "learner.deterministic", False),
    made(
        "eval_strategy",
        "`learner.eval_every`",
        "no",
        "`steps`: the number in `eval_steps`. The first evaluation is before step 1.",
        _evaluations,
    ),
    used("evaluation_strategy", "`learner.eval_every`", None, "An older name of `eval_strategy`."),
    used("eval_steps", "`learner.eval_every`", None, "Divided by the updates of a step."),
    used(
        "logging_steps",
        "`learner.eval_every`",
        10,
        "If `eval_steps` is not given, this is the interval of evaluations, as in TRL. It has no effect on logs: every "
        "step is logged.",
    ),
    used("num_generations_eval", "`learner.eval_attempts`", None, "null means `num_generations`."),
    made(
        "save_strategy",
        "`learner.checkpoint_every`",
        "steps",
        "`steps`: the number in `save_steps`. Other strategies leave asyncrl's default.",
        _checkpoints,
    ),
    used("save_steps", "`learner.checkpoint_every`", 500, "Divided by the updates of a step."),
    used("save_total_limit", "`learner.keep_checkpoints`", None, "The same value."),
    made("load_best_model_at_end", "`learner.keep_best`", False, "True becomes 1.", _best),
    made(
        "output_dir",
        "`run.dir`, `run.name`",
        None,
        "The last folder is the run's name, if `run_name` is not given.",
        _folder,
    ),
    used("run_name", "`run.name`", None, "The same name; special characters become `-`."),
    made(
        "report_to",
        "`observe.sinks`",
        "none",
        "wandb, tensorboard and trackio are copied. Every role also writes its metrics as JSON lines.",
        _sinks,
    ),
    made("project", "`observe.project`", "huggingface", "The same value.", _project),
    made("log_completions", "`observe.keep_episodes`", None, "False becomes 0: no text is kept.", _kept),
)

OTHERS: tuple[Row, ...] = (
    none(
        "",
        "num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo",
        "`observe.keep_episodes` keeps episodes, which the dashboard and `asyncrl inspect` show.",
    ),
    none(
        "",
        "pad_to_multiple_of ds3_gather_for_generation auto_find_batch_size average_tokens_across_devices "
        "per_gpu_train_batch_size torch_empty_cache_steps",
        "Sequences are packed without padding, in passes of `learner.micro_tokens` tokens.",
    ),
    none(
        "",
        "adam_epsilon optim_args optim_target_modules label_smoothing_factor neftune_noise_alpha",
        "The optimizer has no such settings (docs/training.md).",
    ),
    none(
        "",
        "bf16_full_eval fp16_full_eval tf32 fp16_opt_level half_precision_backend fp16_backend",
        "Evaluations use the engine, whose dtype is `model.dtype`.",
    ),
    none(
        "",
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_backend "
        "torch_compile_mode use_liger_kernel use_liger_loss liger_kernel_config use_cache",
        "The learner has its own settings for layers, memory and kernels (docs/training.md).",
    ),
    none(
        "",
        "deepspeed fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap accelerator_config "
        "parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout ddp_timeout_delta local_rank tpu_num_cores mp_parameters use_cpu no_cuda "
        "use_mps_device",
        "Weights are sharded over the learner's GPUs (docs/training.md, docs/cluster.md).",
    ),
    none(
        "",
        "logging_strategy logging_first_step logging_dir log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica disable_tqdm include_num_input_tokens_seen include_tokens_per_second trackio_space_id "
        "trackio_bucket_id trackio_static_space_id skip_memory_metrics debug",
        "Every step is logged. The log goes to the console and to the run's folder.",
    ),
    none(
        "",
        "eval_delay per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only eval_on_start "
        "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "metric_for_best_model greater_is_better include_inputs_for_metrics",
        "Evaluations play all tasks of `data.eval`; `learner.best_by` names the result that ranks checkpoints.",
    ),
    none(
        "",
        "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint overwrite_output_dir "
        "ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint",
        "A checkpoint is always complete. A second start with the same run.name resumes the run.",
    ),
    none(
        "",
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token",
        "Use `asyncrl push-to-hub` after the run.",
    ),
    none(
        "",
        "data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order label_names "
        "train_sampling_strategy group_by_length length_column_name past_index",
        "The replay hands out tasks; `data.shuffle` and `run.seed` set their order.",
    ),
    none("", "do_train do_eval do_predict", "`asyncrl train` trains, and `asyncrl evaluate` evaluates."),
    none("", "optimizers", "`learner.optimizer` and `learner.schedule` name an optimizer and a schedule."),
    none("", "env", "Set these variables in the shell that starts the run."),
)
