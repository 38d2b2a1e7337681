"""The settings of both sides of benchmarks.versus_verl: the same work, and for each program what is fastest for it.

verl's settings follow the advice of its documentation for small models. Its engine has CUDA graphs for all requests,
passes are packed to a number of tokens, and kernels are fused. There are no gradient checkpoints and no reference
policy, and log-probs of the engine are not computed again. Both sides truncate importance weights of tokens at 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.quoting import as_word
from asyncrl.tools.calculator import Calculator

PARTS, ATTENTION = "benchmarks.verl_grpo", "benchmarks.verl_attention"
"""The modules that verl's processes import."""
RULES = ("gsm8k", "exact_number")
"""asyncrl's rules that PARTS has for verl, too."""
STAND_IN = "flash_attn-2.8.3"
_PADDING = (
    "from transformers.modeling_flash_attention_utils import _pad_input as pad_input, _unpad_input as unpad_input"
)
MODULES = {"verl-async": "verl.experimental.fully_async_policy.fully_async_main"}
SYNCHRONOUS = "verl.trainer.main_ppo"
TRIED = 1000000
"""More steps, epochs and tasks than any run has: its seconds end it."""
TRUNCATED = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
"""verl's words for importance weights that are truncated at 2, token by token."""
BACKENDS = {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none"}
"""SGLang's parts on both sides. The model's heads have 64 values, for which a trimmed SGLang has no other kernels."""
ENVIRONMENT = {
    # Ray would kill workers on a machine whose reported memory grows while it is used.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "HYDRA_FULL_ERROR": "1",
    # SGLang's servers set this for themselves, and both ends of a transfer need the same.
    "NCCL_CUMEM_ENABLE": "0",
}


@dataclass(frozen=True)
class Work:
    """The training of both sides. `at_once` is the number of episodes at once, and `micro_tokens` the size of a pass of
    the learner. `rule` is one of RULES."""

    model: Path
    train: Path
    held_out: Path
    gpus: int = 2
    batch: int = 256
    group: int = 16
    lr: float = 2e-5
    turns: int = 8
    turn_tokens: int = 128
    episode_tokens: int = 1024
    prompt_tokens: int = 512
    micro_tokens: int = 32768
    at_once: int = 512
    max_lag: int = 4
    eval_every: int = 20
    rule: str = "gsm8k"

    @property
    def groups(self) -> int:
        return self.batch // self.group


def write_parts(folder: Path, work: Work) -> None:
    """Write the files that name verl its tool and its agent loop."""
    tool = {
        "class_name": f"{PARTS}.Calculator",
        "config": {"type": "native"},
        "tool_schema": {"type": "function", "function": dict(Calculator.schema)},
    }
    loop = {
        "name": "bounded",
        "_target_": f"{PARTS}.BoundedEpisode",
        "turn_tokens": work.turn_tokens,
        "episode_tokens": work.episode_tokens,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool]}, sort_keys=False))
    (folder / "loops.yaml").write_text(yaml.safe_dump([loop], sort_keys=False))


def write_stand_in(folder: Path) -> None:
    """Write a package `flash_attn` into a folder. transformers and verl look for its name and version."""
    package, about = folder / "flash_attn", folder / f"{STAND_IN}.dist-info"
    for each in (package, about):
        each.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f"from {ATTENTION} import *\n")
    (package / "bert_padding.py").write_text(f"{_PADDING}\n")
    name, _, version = STAND_IN.partition("-")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "top_level.txt").write_text(f"{name}\n")


def verl_module(side: str) -> str:
    return MODULES.get(side, SYNCHRONOUS)


def verl_settings(side: str, work: Work, folder: Path) -> Mapping[str, Any]:
    """The keys of verl's configuration, with their values. A key that begins with + is not in verl's defaults."""
    return {**_common(work, folder), **_OF_SIDE[side](work)}


def _common(work: Work, folder: Path) -> dict[str, Any]:
    actor, model, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
    sglang = f"+{rollout}.engine_kwargs.sglang"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        # The engine's log-probs are the behaviour policy's, as in asyncrl: weights are truncated, and there is no
        # second forward pass. verl's trainers tell their workers nothing of this, so the actor has it, too.
        f"{actor}.policy_loss.loss_mode": "bypass_mode",
        **{f"algorithm.rollout_correction.{key}": value for key, value in TRUNCATED.items()},
        **{f"+{actor}.policy_loss.rollout_correction.{key}": value for key, value in TRUNCATED.items()},
        "data.train_files": str(work.train),
        "data.val_files": str(work.held_out),
        "data.max_prompt_length": work.prompt_tokens,
        "data.max_response_length": work.episode_tokens,
        "data.return_raw_chat": True,
        f"{model}.path": str(work.model),
        f"{model}.use_remove_padding": True,
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.use_liger": True,
        f"{model}.use_fused_kernels": True,
        # Those in Triton need a hidden size that 128 divides, and those of Liger nvidia-cutlass-dsl on Hopper GPUs.
        f"{model}.fused_kernel_options.impl_backend": "torch",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.optim.lr": work.lr,
        f"{actor}.optim.betas": [0.9, 0.99],
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.lr_scheduler_type": "constant",
        f"{actor}.ppo_mini_batch_size": work.groups,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": work.micro_tokens,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{rollout}.name": "sglang",
        f"{rollout}.n": work.group,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.max_num_seqs": work.at_once,
        f"{rollout}.calculate_log_probs": True,
        **{f"{sglang}.{key.replace('-', '_')}": value for key, value in BACKENDS.items()},
        f"{sglang}.cuda_graph_max_bs_decode": work.at_once,
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.format": "hermes",
        f"{rollout}.multi_turn.max_assistant_turns": work.turns,
        f"{rollout}.multi_turn.max_parallel_calls": work.turns,
        f"{rollout}.multi_turn.max_tool_response_length": work.episode_tokens,
        f"{rollout}.multi_turn.tool_config_path": str(folder / "tools.yaml"),
        f"{rollout}.agent.agent_loop_config_path": str(folder / "loops.yaml"),
        f"{rollout}.agent.default_agent_loop": "bounded",
        f"{rollout}.agent.num_workers": 16,
        "reward.num_workers": 8,
        "reward.custom_reward_function.path": f"pkg://{PARTS}",
        "reward.custom_reward_function.name": work.rule,
        "trainer.nnodes": 1,
        "trainer.logger": ["console"],
        "trainer.project_name": "versus_verl",
        "trainer.experiment_name": folder.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.resume_mode": "disable",
        "trainer.save_freq": -1,
        "trainer.val_before_train": True,
        "trainer.test_freq": work.eval_every,
        "trainer.total_epochs": TRIED,
        "ray_kwargs.ray_init.num_cpus": 64,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 4 << 30,
    }


def _colocated(mode: str) -> Mapping[str, Any]:
    rollout = "actor_rollout_ref.rollout"
    return {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": mode,
        "trainer.total_training_steps": TRIED,
        f"{rollout}.gpu_memory_utilization": 0.6,
    }


def _synchronous(work: Work) -> Mapping[str, Any]:
    return {
        **_colocated("sync"),
        "trainer.n_gpus_per_node": work.gpus,
        "data.train_batch_size": work.groups,
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{PARTS}",
        "trainer.v1.sampler.custom_sampler.name": "FrequentSampler",
    }


def _one_batch_ahead(work: Work) -> Mapping[str, Any]:
    return {
        **_colocated("colocate_async"),
        "trainer.n_gpus_per_node": work.gpus,
        "data.train_batch_size": work.groups,
        "data.gen_batch_size": 1,
        "trainer.v1.colocate_async.num_warmup_batches": 1,
        "trainer.v1.sampler.max_off_policy_threshold": work.max_lag,
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{PARTS}",
        "trainer.v1.sampler.custom_sampler.name": "FrequentAsyncSampler",
    }


def _fully_asynchronous(work: Work) -> Mapping[str, Any]:
    """Half of the GPUs train, and the others have servers. `max_lag` 1 is one step off."""
    rollout, queue = "actor_rollout_ref.rollout", "async_training"
    half = max(1, work.gpus // 2)
    return {
        "trainer.n_gpus_per_node": half,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": max(1, work.gpus - half),
        "rollout.total_rollout_steps": TRIED,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.actor.use_rollout_log_probs": True,
        f"{rollout}.gpu_memory_utilization": 0.8,
        f"{rollout}.checkpoint_engine.backend": "nccl",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 512,
        f"{queue}.staleness_threshold": work.max_lag,
        f"{queue}.trigger_parameter_sync_step": 1,
        f"{queue}.require_batches": 1,
        f"{queue}.partial_rollout": True,
        f"{queue}.concurrent_samples_per_replica": max(1, work.at_once // work.group),
    }


_OF_SIDE = {"verl-sync": _synchronous, "verl-ahead": _one_batch_ahead, "verl-async": _fully_asynchronous}


def asyncrl_settings(side: str, work: Work, folder: Path, servers_python: str) -> Mapping[str, Any]:
    """The keys of asyncrl's configuration, with their values."""
    engine: Mapping[str, Any] = {"engine": "embedded", "engine.slots": work.at_once}
    if side == "asyncrl-servers":
        engine = {
            "engine": "sglang",
            "engine.python": servers_python,
            "engine.server.arguments": [f"--{key}={value}" for key, value in BACKENDS.items()],
        }
    return {
        "experiment": "gsm8k_calculator",
        **engine,
        "run.dir": str(folder.parent.absolute()),
        "run.name": folder.name,
        "model.path": str(work.model.absolute()),
        "data.train": str(work.train.absolute()),
        "data.eval": str(work.held_out.absolute()),
        "cluster.gpus": work.gpus,
        "actor.concurrency": work.at_once,
        "actor.max_turns": work.turns,
        "actor.max_turn_tokens": work.turn_tokens,
        "actor.max_tokens": work.episode_tokens,
        "actor.max_total_tokens": work.episode_tokens,
        "scoring.rule": work.rule,
        "learner.steps": TRIED,
        "learner.batch_size": work.batch,
        "learner.group_size": work.group,
        "learner.lr": work.lr,
        "learner.micro_tokens": work.micro_tokens,
        "learner.eval_every": work.eval_every,
        "learner.checkpoint_every": TRIED,
        "learner.export": False,
        "replay.max_lag": work.max_lag,
        "weights.mode": "in_place",
        "network.replay_port": 0,
        "network.weights_port": 0,
    }


def words(settings: Mapping[str, Any]) -> Sequence[str]:
    """The settings as words of a command line."""
    return [as_word(key, value) for key, value in settings.items()]
