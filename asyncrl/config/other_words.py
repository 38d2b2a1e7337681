"""Translates words of TRL, verl, prime-rl, OpenRLHF and slime into keys of asyncrl, so that the refusal of such a word
can name the key.

Only the last part of a key counts: `actor_rollout_ref.rollout.n` and `n` are the same word. A word that means different
things in two systems has both keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.keys import MISSPELT, nearest
from asyncrl.config.option import as_yaml

VERL = ("actor_rollout_ref", "async_training", "custom_reward_function", "reward", "reward_model", "trainer")
"""Sections of verl's configuration that asyncrl lacks."""
KEYS: Mapping[str, str] = {
    # The optimizer and its schedule.
    "learning_rate": "learner.lr",
    "actor_learning_rate": "learner.lr",
    "critic_learning_rate": "critic.lr",
    "lr_scheduler_type": "learner.schedule",
    "lr_scheduler": "learner.schedule",
    "lr_decay_style": "learner.schedule",
    "min_lr": "learner.lr_floor",
    "min_lr_ratio": "learner.lr_floor",
    "lr_warmup_steps": "learner.warmup_steps",
    "lr_warmup_iters": "learner.warmup_steps",
    "warmup_ratio": "learner.warmup_steps",
    "lr_warmup_ratio": "learner.warmup_steps",
    "lr_warmup_steps_ratio": "learner.warmup_steps",
    "adam_beta1": "learner.betas",
    "adam_beta2": "learner.betas",
    "adam_betas": "learner.betas",
    "l2": "learner.weight_decay",
    "optim": "learner.optimizer",
    "optimizer_name": "learner.optimizer",
    "grad_clip": "learner.max_grad_norm",
    "clip_grad": "learner.max_grad_norm",
    "max_norm": "learner.max_grad_norm",
    "adam_offload": "learner.optimizer_on_host",
    "optimizer_offload": "learner.optimizer_on_host",
    "optimizer_cpu_offload": "learner.optimizer_on_host",
    # Steps and batches.
    "max_steps": "learner.steps",
    "num_steps": "learner.steps",
    "total_training_steps": "learner.steps",
    "num_rollout": "learner.steps",
    "num_train_epochs": "learner.epochs",
    "num_epochs": "learner.epochs",
    "total_epochs": "learner.epochs",
    "num_episodes": "learner.epochs",
    "num_epoch": "learner.epochs",
    "train_batch_size": "learner.batch_size",
    "global_batch_size": "learner.batch_size",
    "generation_batch_size": "learner.batch_size",
    "per_device_train_batch_size": "learner.batch_size",
    "rollout_batch_size": "learner.batch_size",
    "gradient_accumulation_steps": "learner.batch_size or learner.micro_tokens",
    "micro_batch_size": "learner.micro_tokens",
    "micro_train_batch_size": "learner.micro_tokens",
    "ppo_micro_batch_size_per_gpu": "learner.micro_tokens",
    "ppo_max_token_len_per_gpu": "learner.micro_tokens",
    "max_tokens_per_gpu": "learner.micro_tokens",
    "num_generations": "learner.group_size",
    "n": "learner.group_size",
    "n_samples_per_prompt": "learner.group_size",
    "rollouts_per_example": "learner.group_size",
    "rollouts_per_prompt": "learner.group_size",
    "num_samples_per_prompt": "learner.group_size",
    "group_n": "learner.group_size",
    "num_iterations": "replay.sampler.max_times_sampled",
    "ppo_epochs": "replay.sampler.max_times_sampled",
    "ppo_mini_batch_size": "learner.minibatches",
    "mini_batch_size": "learner.minibatches",
    "num_steps_per_rollout": "learner.minibatches",
    # Lengths and sampling.
    "max_new_tokens": "actor.max_turn_tokens",
    "max_response_length": "actor.max_turn_tokens or actor.max_tokens",
    "max_completion_length": "actor.max_turn_tokens or actor.max_tokens",
    "rollout_max_response_len": "actor.max_turn_tokens or actor.max_tokens",
    "generate_max_len": "actor.max_turn_tokens or actor.max_tokens",
    "max_len": "actor.max_tokens",
    "max_seq_len": "actor.max_tokens",
    "max_seq_length": "actor.max_tokens",
    "seq_len": "actor.max_tokens",
    "max_model_len": "actor.max_tokens or engine.max_length",
    "rollout_max_context_len": "actor.max_tokens",
    "prompt_max_len": "data.max_prompt_length",
    "rollout_max_prompt_len": "data.max_prompt_length",
    "rollout_temperature": "actor.temperature",
    "max_assistant_turns": "actor.max_turns",
    "max_tool_calling_iterations": "actor.max_turns",
    "max_tool_response_length": "actor.max_tool_chars",
    "max_concurrency": "actor.concurrency",
    "max_concurrent": "actor.concurrency",
    "tool_config_path": "actor.verl_tools",
    "function_tool_path": "actor.verl_tools",
    "interaction_config_path": "actor.interactions",
    # The algorithm.
    "beta": "algorithm.kl",
    "kl_coef": "algorithm.kl",
    "kl_beta": "algorithm.kl",
    "init_kl_coef": "algorithm.kl",
    "kl_loss_coef": "algorithm.kl",
    "use_kl_loss": "algorithm.kl",
    "use_kl_in_reward": "algorithm.kl",
    "kl_estimator": "algorithm.kl.name",
    "kl_loss_type": "algorithm.kl.name",
    "epsilon": "algorithm.loss.params.clip_low and algorithm.loss.params.clip_high",
    "epsilon_high": "algorithm.loss.params.clip_high",
    "clip_ratio": "algorithm.loss.params.clip_low and algorithm.loss.params.clip_high",
    "clip_eps": "algorithm.loss.params.clip_low and algorithm.loss.params.clip_high",
    "cliprange": "algorithm.loss.params.clip_low and algorithm.loss.params.clip_high",
    "eps_clip": "algorithm.loss.params.clip_low and algorithm.loss.params.clip_high",
    "eps_clip_high": "algorithm.loss.params.clip_high",
    "clip_ratio_low": "algorithm.loss.params.clip_low",
    "clip_ratio_high": "algorithm.loss.params.clip_high",
    "clip_ratio_c": "algorithm.loss.params.dual_clip",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "scale_rewards": "algorithm.advantage.params.normalise_std",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.params.normalise_std",
    "lam": "algorithm.advantage.params.lam",
    "lambd": "algorithm.advantage.params.lam",
    "loss_type": "algorithm.loss or algorithm.aggregation",
    "loss_mode": "algorithm.loss",
    "policy_loss": "algorithm.loss",
    "loss_agg_mode": "algorithm.aggregation",
    "entropy_coef": "algorithm.entropy_weight",
    "entropy_coeff": "algorithm.entropy_weight",
    "entropy_loss_coef": "algorithm.entropy_weight",
    "use_tis": "algorithm.correction",
    "tis_imp_ratio_cap": "algorithm.correction",
    "vllm_importance_sampling_cap": "algorithm.correction",
    "dynamic_filtering": "replay.filter.zero_variance",
    "filter_groups": "replay.filter.zero_variance",
    # Staleness.
    "max_async_level": "replay.max_lag",
    "async_level": "replay.max_lag",
    "max_off_policy_steps": "replay.max_lag",
    "max_head_offpolicyness": "replay.max_lag",
    "staleness_threshold": "replay.max_lag",
    "over_sampling_batch_size": "replay.oversample",
    # Rewards.
    "reward_funcs": "scoring.rule",
    "reward_function": "scoring.rule",
    "custom_reward_function": "scoring.rule",
    "custom_rm_path": "scoring.rule",
    "rm_type": "scoring.rule",
    "remote_rm_url": "scoring.outcome_model.path",
    "reward_pretrain": "scoring.outcome_model.path",
    "reward_model_path": "scoring.outcome_model.path",
    "prm_model_path": "scoring.prm.path",
    # The model.
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "hf_checkpoint": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "model.activations",
    "enable_gradient_checkpointing": "model.activations",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets",
    # Data.
    "train_files": "data.train",
    "train_file": "data.train",
    "prompt_data": "data.train",
    "dataset_name": "data.train",
    "val_files": "data.eval",
    "eval_dataset": "data.eval",
    "eval_prompt_data": "data.eval",
    "prompt_key": "data.columns",
    "input_key": "data.columns",
    "label_key": "data.columns",
    "answer_key": "data.columns",
    "shuffle_dataset": "data.shuffle",
    "rollout_shuffle": "data.shuffle",
    "filter_overlong_prompts": "data.filter_overlong",
    # Checkpoints, evaluations, and where things are shown.
    "save_every": "learner.checkpoint_every",
    "save_steps": "learner.checkpoint_every",
    "save_freq": "learner.checkpoint_every",
    "save_interval": "learner.checkpoint_every",
    "save_total_limit": "learner.keep_checkpoints",
    "max_ckpt_num": "learner.keep_checkpoints",
    "max_actor_ckpt_to_keep": "learner.keep_checkpoints",
    "eval_steps": "learner.eval_every",
    "eval_interval": "learner.eval_every",
    "test_freq": "learner.eval_every",
    "n_samples_per_eval_prompt": "learner.eval_attempts",
    "output_dir": "run.dir and run.name",
    "default_local_dir": "run.dir and run.name",
    "save_path": "run.dir and run.name",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "report_to": "observe.sinks",
    "logger": "observe.sinks",
    "use_wandb": "observe.sinks",
    "wandb_project": "observe.project",
    "project_name": "observe.project",
    "log_completions": "observe.keep_episodes",
    "log_val_generations": "observe.keep_evaluated",
    "rollout_data_dir": "observe.keep_episodes",
    # GPUs and servers.
    "gpu_memory_utilization": "engine.server.memory",
    "vllm_gpu_memory_utilization": "engine.server.memory",
    "sglang_mem_fraction_static": "engine.server.memory",
    "mem_fraction_static": "engine.server.memory",
    "tensor_model_parallel_size": "engine.server.tp_size",
    "vllm_tensor_parallel_size": "engine.server.tp_size",
    "rollout_num_gpus_per_engine": "engine.server.tp_size",
    "vllm_num_engines": "engine.server.count",
    "vllm_server_base_url": "engine.urls",
    "base_url": "engine.urls",
    "colocate": "cluster.colocated",
    "colocate_all_models": "cluster.colocated",
    "vllm_mode": "cluster.colocated",
    "n_gpus_per_node": "cluster.gpus",
    "num_gpus_per_node": "cluster.gpus",
    "nnodes": "learner.nodes",
    "ulysses_sequence_parallel_size": "learner.context_ranks",
    "context_parallel_size": "learner.context_ranks",
    "expert_model_parallel_size": "learner.expert_ranks",
}
"""Our key or keys for each word of another system, in the form that a message shows."""

REMARKS: Mapping[str, str] = {
    "learner.lr_floor": "It is a share of learner.lr, not a rate",
    "learner.batch_size": "It counts all episodes of a step, on all GPUs together",
    "run.dir and run.name": "The first is the folder of all runs, and the second names one run in it",
}
"""A difference from other systems, for each entry of `KEYS` that needs this remark."""

WITHOUT = {
    "top_p": "the correction needs the log-probs of the whole distribution, so actors sample from all of it",
    "repetition_penalty": "the correction needs the log-probs of the policy itself, which a penalty would change",
    "logging_steps": "every step is logged",
    "log_interval": "every step is logged",
    "resume": "a second start with the same run.name resumes the run",
    "resume_mode": "a second start with the same run.name resumes the run",
    "resume_from_checkpoint": "a second start with the same run.name resumes the run",
    "micro_batch_size_per_device": "passes are bounded in tokens, by learner.micro_tokens",
    "use_vllm": "write engine=vllm, engine=sglang or engine=embedded",
    "sync_ref_model": "the reference of the KL is always the model of model.path, without adapters of model.lora.path",
}
"""A text for each word of another system that has no key here. It tells why there is no key, or how to get the same
effect."""

KL_WEIGHTS = {"beta", "kl_coef", "kl_beta", "init_kl_coef", "kl_loss_coef"}
"""The words for the weight of the KL. In asyncrl the weight is a parameter of an estimator of the KL, so the hint names
an estimator too."""
OF_KL = "algorithm.kl.weight"
EXAMPLE = 0.001
"""The weight that the hint shows if the given value is not a number."""

_SAME = {"top_k": "top_p", "min_p": "top_p", "presence_penalty": "repetition_penalty"}
"""Words that have the same text as another word."""


def is_of_verl(key: str) -> bool:
    """True if the key is in a section that only verl has."""
    section, dot, _ = key.partition(".")
    return bool(dot) and section in VERL


def hint(key: str, value: Any = None) -> str:
    """The end of the message that refuses `key` with this value. If the key is a word of another system, the text names
    our key, or tells why there is none. Otherwise it is empty."""
    word = key.rpartition(".")[2].lower().replace("-", "_")
    if word in KL_WEIGHTS or key == OF_KL:
        return f"; did you mean {_kl_of(value)}?"
    if reason := WITHOUT.get(_SAME.get(word, word)):
        return f": {reason}"
    near = nearest(word, KEYS, MISSPELT)
    if (ours := KEYS.get(word) or KEYS.get(near)) is None:
        return ""
    return f"; did you mean {ours}?" + (f" {REMARKS[ours]}" if ours in REMARKS else "")


def _kl_of(weight: Any) -> str:
    if weight == 0:
        return "algorithm.kl=none"
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return with_kl({"weight": weight if is_number else EXAMPLE})


def with_kl(params: Mapping[str, Any]) -> str:
    """The word of the command line, quoted for a shell, that adds a KL with these parameters to the loss."""
    return f'algorithm.kl="{as_yaml({"name": "k3", "params": {**params}})}"'
