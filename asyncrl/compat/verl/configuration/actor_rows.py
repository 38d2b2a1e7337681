"""Translates the keys of verl's sections `actor_rollout_ref.actor` and `.ref`, and `critic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.compat.rows import Setting, made, none, same, used
from asyncrl.compat.verl.configuration.data_rows import PROMPT, RESPONSE
from asyncrl.compat.verl.configuration.model_rows import FREEZES_MIXTURE, adapters, has_adapters, path_row
from asyncrl.compat.verl.configuration.source import VerlConfig

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
OPTIM = f"{ACTOR}.optim"
CPU_OFFLOAD = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
POLICY_LOSS = f"{ACTOR}.policy_loss"
FSDP = f"{ACTOR}.fsdp_config"
ENGINES = ("fsdp_config", "megatron", "torchtitan", "veomni")
"""The sections of verl's training engines."""
STEPS = "trainer.total_training_steps"
ESTIMATOR = "algorithm.adv_estimator"
CRITIC_MODEL = "critic.model"
CRITIC_PATH = f"{CRITIC_MODEL}.path"
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
}
LEARNERS_OWN = "The learner has its own settings for layers, memory and kernels (docs/training.md)."


def _dtype(source: VerlConfig) -> Iterator[Setting | str]:
    given = source[f"{ACTOR}.megatron.dtype"] or source[f"{ACTOR}.torchtitan.dtype"] or source[f"{FSDP}.dtype"]
    yield "model.dtype", DTYPES.get(str(given), "bfloat16")
    if str(given) not in DTYPES:
        yield f"{FSDP}.dtype={given}: model.dtype is bfloat16; it may also be float32 or float16"


def router_replay_of(source: VerlConfig) -> str | None:
    """The mode of router replay; None if it is off."""
    modes = (source[f"{ACTOR}.{section}router_replay.mode"] for section in ("", "megatron.", "veomni."))
    return next((mode for mode in modes if mode not in (None, "disabled")), None)


def _router_replay(source: VerlConfig) -> Iterator[Setting | str]:
    mode = router_replay_of(source)
    if mode == "R3":
        yield "learner.router_replay", True
    elif mode is not None:
        yield f"{ACTOR}.router_replay.mode={mode}: left out, because asyncrl only replays the rollout's experts (R3)"


def _freeze(source: VerlConfig) -> Iterator[Setting | str]:
    mixture = next((key for key in FREEZES_MIXTURE if source.values.get(key) is not None), FREEZES_MIXTURE[0])
    asked = {f"{ACTOR}.freeze_vision_tower": "vision", mixture: "verl_moe"}
    wanted = {key: rule for key, rule in asked.items() if source.values.get(key)}
    if wanted and has_adapters(source):
        yield f"{', '.join(wanted)}: LoRA trains only the adapters; name their layers in model.lora.targets"
    elif wanted:
        yield "model.freeze", list(wanted.values())


def _micro_tokens(source: VerlConfig) -> Iterator[Setting | str]:
    longest = source[PROMPT] + source[RESPONSE]
    sequences = source[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
    if source[f"{ACTOR}.use_dynamic_bsz"]:
        yield "learner.micro_tokens", max(longest, source[f"{ACTOR}.ppo_max_token_len_per_gpu"])
    elif sequences:
        yield "learner.micro_tokens", sequences * longest


def _epochs(source: VerlConfig) -> Iterator[Setting | str]:
    if (epochs := source[f"{ACTOR}.ppo_epochs"]) != 1:
        yield (
            f"{ACTOR}.ppo_epochs={epochs}: a step trains once on its batch; "
            "replay.sampler.max_times_sampled lets later batches contain the same groups again"
        )


def _warmup(source: VerlConfig) -> Iterator[Setting | str]:
    steps, share = source[f"{OPTIM}.lr_warmup_steps"], source[f"{OPTIM}.lr_warmup_steps_ratio"]
    total = source[STEPS] or max(0, source[f"{OPTIM}.total_training_steps"])
    if steps is not None and steps > 0:
        yield "learner.warmup_steps", min(steps, total) if total else steps
    elif share and total:
        yield "learner.warmup_steps", round(share * total)
    elif share:
        yield "learner.warmup_steps", share


def _schedule(source: VerlConfig) -> Iterator[Setting | str]:
    names = ("warmup_style", "lr_decay_style", "decay_type", "lr_scheduler_type")
    given = next(value for name in names if (value := source[f"{OPTIM}.{name}"]))
    if given in ("constant", "cosine", "linear"):
        yield "learner.schedule", given
    else:
        yield f"{OPTIM}.lr_scheduler_type={given}: learner.schedule is constant; it may also be linear or cosine"
    lowest = source[f"{OPTIM}.min_lr"] or source[f"{OPTIM}.lr_min"]
    share = source[f"{OPTIM}.min_lr_ratio"] or source[f"{OPTIM}.min_lr_factor"]
    if given in ("cosine", "linear") and (share or lowest):
        yield "learner.lr_floor", share or lowest / source[f"{OPTIM}.lr"]


def _optimizer(source: VerlConfig) -> Iterator[Setting | str]:
    given = str(source[f"{OPTIM}.name"] or source[f"{OPTIM}.optimizer"])
    eight = "8bit" in given.lower()
    yield "learner.optimizer", "adamw_8bit" if eight else "muon" if given.lower() == "muon" else "adamw"
    # `adam` is the name in Megatron, whose Adam decays weights as AdamW does.
    if given not in ("adam", "AdamW", "adamw", "AdamW8bit", "Muon", "muon"):
        yield f"{OPTIM}.optimizer={given}: learner.optimizer is adamw"


def _clip(source: VerlConfig) -> Iterator[Setting | str]:
    # verl clips at `optim.clip_grad`. Older releases had only `actor.grad_clip`.
    newer, older = f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip"
    yield "learner.max_grad_norm", source[newer if source.says(newer) else older]
    if source.says(newer) and source.says(older) and source[newer] != source[older]:
        yield f"{older}={source[older]}: verl clips at {newer}={source[newer]}, and so does learner.max_grad_norm"


def _on_host(source: VerlConfig) -> Iterator[Setting | str]:
    keys = (CPU_OFFLOAD, *(f"{ACTOR}.{each}.optimizer_offload" for each in ENGINES))
    yield "learner.optimizer_on_host", any(source[key] for key in keys)
    yield "learner.reference_on_host", any(source[f"{REF}.{each}.param_offload"] for each in ENGINES)


def _reshard(source: VerlConfig) -> Iterator[Setting | str]:
    if source[f"{FSDP}.reshard_after_forward"] is False:
        yield "learner.reshard", 0.0


def _compile(source: VerlConfig) -> Iterator[Setting | str]:
    if not (source[f"{ACTOR}.use_torch_compile"] and source[f"{FSDP}.use_torch_compile"]):
        yield "model.compile", False


def _has_critic(source: VerlConfig) -> bool:
    return bool(source[ESTIMATOR] == "gae")


def _names_critic(source: VerlConfig) -> bool:
    return _has_critic(source) and source.says(CRITIC_PATH)


def _critic(source: VerlConfig) -> Iterator[Setting | str]:
    if _has_critic(source):
        yield "critic.lr", source["critic.optim.lr"]


def _critics_adapters(source: VerlConfig) -> Iterator[Setting | str]:
    folder = source[f"{CRITIC_MODEL}.lora_adapter_path"]
    if _has_critic(source) and (folder is not None or source[f"{CRITIC_MODEL}.lora_rank"]):
        yield from adapters(source, CRITIC_MODEL, "critic.lora", folder)


def _value_clip(source: VerlConfig) -> Iterator[Setting | str]:
    if _has_critic(source):
        clip: dict[str, Any] = {"clip": source["critic.cliprange_value"]}
        yield "algorithm.value", {"name": "clipped", "params": clip}


ROWS = (
    used(f"{ACTOR}.ppo_mini_batch_size", "`learner.minibatches`", 256, "`train_batch_size / ppo_mini_batch_size`."),
    made(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "`learner.micro_tokens`",
        None,
        "This number times `max_prompt_length + max_response_length`. It is not used with `use_dynamic_bsz`.",
        _micro_tokens,
    ),
    used(f"{ACTOR}.use_dynamic_bsz", "`learner.micro_tokens`", False, "True: `ppo_max_token_len_per_gpu` is used."),
    used(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "`learner.micro_tokens`",
        16384,
        "Used with `use_dynamic_bsz`, but at least `max_prompt_length + max_response_length`.",
    ),
    none(ACTOR, "ppo_micro_batch_size", "Use `ppo_micro_batch_size_per_gpu`."),
    made(
        f"{ACTOR}.ppo_epochs",
        "",
        1,
        "A step trains once on its batch. `replay.sampler.max_times_sampled` lets later batches contain the same "
        "groups again.",
        _epochs,
    ),
    same(f"{OPTIM}.lr", "learner.lr", 1e-6),
    same(f"{OPTIM}.betas", "learner.betas", [0.9, 0.999]),
    same(f"{OPTIM}.weight_decay", "learner.weight_decay", 0.01),
    made(
        f"{OPTIM}.optimizer",
        "`learner.optimizer`",
        "AdamW",
        "`AdamW8bit` becomes `adamw_8bit`, `Muon` becomes `muon`, and all others become `adamw`.",
        _optimizer,
    ),
    made(
        f"{OPTIM}.lr_warmup_steps",
        "`learner.warmup_steps`",
        -1,
        "The same value, but at most the number of training steps.",
        _warmup,
    ),
    used(
        f"{OPTIM}.lr_warmup_steps_ratio",
        "`learner.warmup_steps`",
        0.0,
        "The ratio times the number of training steps. If no key gives that number, `learner.warmup_steps` is the "
        "ratio itself, as a share of all steps.",
    ),
    used(
        f"{OPTIM}.total_training_steps",
        "`learner.warmup_steps`",
        -1,
        "The number of training steps for the two warm-up keys, if `trainer.total_training_steps` is null.",
    ),
    made(
        f"{OPTIM}.lr_scheduler_type",
        "`learner.schedule`, `learner.lr_floor`",
        "constant",
        "A schedule other than `constant`, `cosine` and `linear` becomes `constant`.",
        _schedule,
    ),
    used(f"{OPTIM}.warmup_style", "`learner.schedule`", None, "An older name of `lr_scheduler_type`."),
    used(f"{OPTIM}.min_lr_ratio", "`learner.lr_floor`", 0.0, "Used with a cosine or linear schedule."),
    used(f"{OPTIM}.lr_decay_style", "`learner.schedule`", None, "As `lr_scheduler_type`, for Megatron."),
    used(f"{OPTIM}.min_lr", "`learner.lr_floor`", 0.0, "This rate divided by `lr`, for Megatron."),
    used(f"{OPTIM}.lr_min", "`learner.lr_floor`", 0.0, "As `min_lr`, for VeOmni."),
    used(f"{OPTIM}.decay_type", "`learner.schedule`", None, "As `lr_scheduler_type`, for TorchTitan."),
    used(f"{OPTIM}.min_lr_factor", "`learner.lr_floor`", 0.0, "As `min_lr_ratio`, for TorchTitan."),
    used(f"{OPTIM}.name", "`learner.optimizer`", None, "As `optimizer`, for TorchTitan."),
    none(
        OPTIM,
        "optimizer_impl num_cycles zero_indexed_step override_optimizer_config.* eps lr_warmup_init lr_start "
        "lr_decay_steps lr_decay_ratio weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps "
        "use_checkpoint_opt_param_scheduler use_precision_aware_optimizer main_grads_dtype exp_avg_dtype "
        "exp_avg_sq_dtype use_layer_wise_distributed_optimizer muon_momentum muon_nesterov muon_split_qkv "
        "muon_scale_mode muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_fp32_matmul_prec "
        "muon_extra_scale_factor muon_scalar_optimizer muon_match_adamw_update_rms",
        "The optimizer has no such settings. The warm-up begins near 0, and the schedule ends with the last step.",
    ),
    made(f"{OPTIM}.clip_grad", "`learner.max_grad_norm`", None, "The same value.", _clip),
    used(
        f"{ACTOR}.grad_clip",
        "`learner.max_grad_norm`",
        1.0,
        "Used if `optim.clip_grad` is not given, as in releases before 0.9. In verl 0.9.1 it has no effect.",
    ),
    made(
        f"{FSDP}.dtype",
        "`model.dtype`",
        "bfloat16",
        "The dtype of forward and backward passes. Weights and moments are float32, as in verl.",
        _dtype,
    ),
    made(
        f"{FSDP}.optimizer_offload",
        "`learner.optimizer_on_host`, `learner.reference_on_host`",
        False,
        "`learner.optimizer_on_host` is true if this key is true for one of verl's engines. `ref.*.param_offload` sets "
        "`learner.reference_on_host`.",
        _on_host,
    ),
    *(
        used(f"{ACTOR}.{each}.optimizer_offload", "`learner.optimizer_on_host`", False, "As with FSDP.")
        for each in ENGINES[1:]
    ),
    used(CPU_OFFLOAD, "`learner.optimizer_on_host`", False, "As `optimizer_offload`, for Megatron."),
    *(
        used(
            f"{REF}.{each}.param_offload",
            "`learner.reference_on_host`",
            False,
            "True if this key is true for one of verl's engines.",
        )
        for each in ENGINES
    ),
    made(f"{FSDP}.reshard_after_forward", "`learner.reshard`", True, "False becomes 0.", _reshard),
    same(f"{FSDP}.full_determinism", "learner.deterministic", False),
    used(
        f"{FSDP}.use_torch_compile", "`model.compile`", True, "False if this key or `actor.use_torch_compile` is false."
    ),
    made(f"{ACTOR}.use_torch_compile", "`model.compile`", True, "True leaves asyncrl's default.", _compile),
    none(
        FSDP,
        "param_offload offload_policy fsdp_size forward_prefetch model_dtype use_orig_params seed wrap_policy.* "
        "ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
        "entropy_checkpointing use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket forward_only "
        "strategy qat.* turbo_config.* mixed_precision.*",
        "Weights are sharded over all ranks, or with `learner.replicas` over the ranks of each replica. Sequence "
        "parallelism is read from `actor.ulysses_sequence_parallel_size`. " + LEARNERS_OWN,
    ),
    none(
        ACTOR,
        "strategy rollout_n shuffle data_loader_seed checkpoint.* profiler.* qat.* use_fused_kernels "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
        "entropy_checkpointing pad_to_length use_remove_padding use_prefix_grouper calculate_entropy "
        "calculate_sum_pi_squared load_weight veomni.* megatron.* torchtitan.* engine.* "
        "router_replay.record_file router_replay.replay_file",
        "Checkpoints are always complete, and the entropy is always reported. " + LEARNERS_OWN,
    ),
    made(
        f"{ACTOR}.freeze_vision_tower",
        "`model.freeze`",
        False,
        "True becomes `[vision]`, which is an error for a model without a vision tower.",
        _freeze,
    ),
    made(
        f"{ACTOR}.router_replay.mode",
        "`learner.router_replay`",
        "disabled",
        "`R3` becomes true.",
        _router_replay,
    ),
    *(
        used(f"{ACTOR}.{each}.router_replay.mode", "`learner.router_replay`", None, "As `actor.router_replay.mode`.")
        for each in ("megatron", "veomni")
    ),
    *(used(f"{ACTOR}.{each}.dtype", "`model.dtype`", None, "As with FSDP.") for each in ("megatron", "torchtitan")),
    none(
        REF,
        "fsdp_config.* strategy rollout_n use_torch_compile log_prob_micro_batch_size log_prob_use_dynamic_bsz "
        "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu profiler.* ulysses_sequence_parallel_size "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing pad_to_length "
        "router_replay.* megatron.* veomni.* torchtitan.* model.* optim.*",
        "The reference is the initial policy. It runs in micro-batches of `learner.micro_tokens` tokens.",
    ),
    path_row(CRITIC_PATH, "critic.path", "~/models/deepseek-llm-7b-chat", _names_critic),
    made(
        f"{CRITIC_MODEL}.lora_rank",
        "`critic.lora`",
        0,
        "Only with `adv_estimator=gae`. 0 trains all weights of the critic.",
        _critics_adapters,
    ),
    used(f"{CRITIC_MODEL}.lora_alpha", "`critic.lora.alpha`", 16, "The same value."),
    used(f"{CRITIC_MODEL}.target_modules", "`critic.lora.targets`", "all-linear", "As for the policy."),
    used(f"{CRITIC_MODEL}.lora_adapter_path", "`critic.lora.path`", None, "As for the policy."),
    made("critic.optim.lr", "`critic.lr`", 1e-5, "Only with `adv_estimator=gae`.", _critic),
    made(
        "critic.cliprange_value",
        "`algorithm.value`",
        0.5,
        "The parameter `clip` of the value loss `clipped`.",
        _value_clip,
    ),
    none(
        "critic",
        "enable ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
        "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu forward_micro_batch_size ppo_epochs "
        "forward_micro_batch_size_per_gpu grad_clip shuffle data_loader_seed rollout_n strategy loss_agg_mode "
        "loss_scale_factor model.* optim.* fsdp.* checkpoint.* profiler.* ulysses_sequence_parallel_size nccl_timeout "
        "megatron.* torchtitan.* veomni.*",
        "A run has a critic if its advantage needs one. All other settings are shared with the policy.",
    ),
)
