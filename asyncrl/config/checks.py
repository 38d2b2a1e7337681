"""What a configuration must satisfy beyond its types. Each refusal names the key, its value and the fix."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.config.engine_checks import check_engine
from asyncrl.config.schema import TrainConfig
from asyncrl.config.scoring_checks import check_scoring
from asyncrl.config.values import require, value
from asyncrl.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")
_LONG_INPUTS = ("refuse", "drop_oldest")

CHOICES: dict[str, Sequence[str]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.attention": ("sdpa", "flash_attention_2", "flex_attention"),
    "actor.history": ("sampled", "template"),
    "engine.kind": ("embedded", "sglang", "vllm"),
    "engine.prefix_cache": ("flush", "salt"),
    "weights.channel": ("zmq", "disk", "distributed"),
    "weights.fallback": ("none", "zmq", "disk"),
    "weights.mode": ("in_place", "retract", "abort", "drain"),
    "replay.durability": ("fsync", "os"),
    "scoring.prm.dtype": _DTYPES,
    "scoring.prm.long_inputs": _LONG_INPUTS,
    "scoring.outcome_model.dtype": _DTYPES,
    "scoring.outcome_model.long_inputs": _LONG_INPUTS,
    "scoring.shaping.prm_aggregation": (
        "mean_response",
        "pooled_last",
        "min",
        "product",
        "per_step",
        "best_of_n",
    ),
    "replay.retention": ("none", "window", "all"),
    "replay.sampler.kind": ("fifo", "freshest", "prioritised"),
    "algorithm.proximal": ("recompute", "interpolate", "behaviour"),
}
MAX_FRAME_MB = 4095
"""A frame's length has 32 bits in the store."""

POSITIVE = (
    "actor.concurrency",
    "actor.episode_timeout_s",
    "actor.max_turns",
    "actor.max_turn_tokens",
    "actor.max_tokens",
    "actor.max_total_tokens",
    "actor.tool_timeout_s",
    "actor.max_tool_chars",
    "engine.slots",
    "weights.timeout_s",
    "engine.max_length",
    "engine.attempts",
    "engine.wait_s",
    "engine.check_s",
    "engine.silence_s",
    "engine.server.count",
    "engine.server.tp_size",
    "engine.server.start_s",
    "weights.bucket_mb",
    "weights.load_s",
    "replay.dead_letter_share",
    "replay.lease_s",
    "replay.max_attempts",
    "replay.max_dead_letters",
    "replay.max_store_gb",
    "replay.retention_steps",
    "replay.sampler.max_times_sampled",
    "replay.shards",
    "data.band_revisit",
    "scoring.batch_trajectories",
    "scoring.batch_tokens",
    "scoring.timeout_s",
    "scoring.rule_processes",
    "scoring.rule_memory_mb",
    "scoring.stall_s",
    "scoring.shaping.tanh_tau",
    "scoring.shaping.tanh_rmax",
    "scoring.shaping.max_step_tokens",
    "scoring.shaping.max_resp_len",
    "scoring.shaping.target_response_length",
    "scoring.shaping.overlong_buffer",
    "scoring.guards.window_s",
    "scoring.guards.reward_rise",
    "scoring.guards.agreement_fall",
    "scoring.prm.micro_tokens",
    "scoring.outcome_model.micro_tokens",
    "learner.steps",
    "learner.batch_size",
    "learner.group_size",
    "learner.minibatches",
    "learner.micro_tokens",
    "learner.lr",
    "learner.max_grad_norm",
    "learner.publish_every",
    "learner.checkpoint_every",
    "learner.keep_checkpoints",
    "critic.lr",
    "implicit.lr",
    "cluster.actors",
    "cluster.scorers",
    "cluster.learner_ranks",
    "cluster.actor_threads",
    "cluster.scorer_threads",
    "cluster.learner_threads",
    "network.max_message_mb",
)
NOT_NEGATIVE = (
    "actor.door_port",
    "engine.segment_tokens",
    "engine.server.port",
    "engine.server.first_gpu",
    "engine.server.max_failures",
    "weights.drain_s",
    "scoring.shaping.overlong_penalty",
    "scoring.shaping.length_bonus_weight",
    "scoring.shaping.prm_acc_bonus_weight",
    "actor.temperature",
    "actor.tool_retries",
    "weights.history",
    "replay.max_lag",
    "replay.sampler.alpha",
    "replay.sampler.beta",
    "replay.shard",
    "learner.weight_decay",
    "learner.warmup_steps",
    "learner.eval_every",
    "cluster.max_restarts",
    "cluster.restart_pause_s",
    "network.replay_port",
    "network.weights_port",
)
KEYS_FIX = (
    "set network.keys to a folder that `asyncrl keys` made, or network.insecure=true on a network where you trust "
    "everyone"
)
GROUP_FIX = (
    "gloo and NCCL know no keys; set weights.channel to zmq or disk, or network.insecure=true on a network where you "
    "trust everyone"
)
SERVER_GROUP_FIX = (
    "gloo and NCCL know no keys; take distributed out of weights.transports, or set network.insecure=true on a network "
    "where you trust everyone"
)
DOOR_FIX = "agents are answered over plain HTTP; use 127.0.0.1, or network.insecure=true on a network that you trust"


def check(config: TrainConfig) -> None:
    """Refuse impossible values and combinations before anything starts. Raises ConfigError."""
    for key, allowed in CHOICES.items():
        require(value(config, key) in allowed, config, key, f"use one of {', '.join(allowed)}")
    for key in POSITIVE:
        require(value(config, key) > 0, config, key, "it must be positive")
    for key in NOT_NEGATIVE:
        require(value(config, key) >= 0, config, key, "it must be 0 or more")
    _check_combinations(config)
    check_engine(config)
    check_scoring(config)
    _check_replay(config)
    _check_files(config)
    network = config.network
    require(network.max_message_mb <= MAX_FRAME_MB, config, "network.max_message_mb", f"at most {MAX_FRAME_MB} fit")
    check_bind(network.host, network.insecure, secured=network.keys is not None)
    check_bind(config.actor.door_host, network.insecure, key="actor.door_host", fix=DOOR_FIX)
    _check_weights(config)


def _check_combinations(config: TrainConfig) -> None:
    learner, actor = config.learner, config.actor
    batch, group = learner.batch_size, learner.group_size
    next_multiple = -(-batch // group) * group
    require(
        batch % group == 0,
        config,
        "learner.batch_size",
        f"groups are whole, so it must be a multiple of learner.group_size={group}, such as {next_multiple}",
    )
    require(
        batch % learner.minibatches == 0,
        config,
        "learner.minibatches",
        f"it must divide learner.batch_size={batch}",
    )
    require(
        config.engine.kind != "embedded" or actor.max_tokens <= config.engine.max_length,
        config,
        "actor.max_tokens",
        f"a slot of the engine holds engine.max_length={config.engine.max_length} tokens; raise that or lower this",
    )
    require(
        (actor.agent is None and actor.history == "sampled") or actor.max_total_tokens >= actor.max_tokens,
        config,
        "actor.max_total_tokens",
        f"one sequence of the episode's may have actor.max_tokens={actor.max_tokens}; raise this or lower that",
    )
    require(
        learner.steps % learner.publish_every == 0,
        config,
        "learner.steps",
        f"the last weights must be published: make it a multiple of learner.publish_every={learner.publish_every}",
    )
    require(
        learner.checkpoint_every % learner.publish_every == 0,
        config,
        "learner.checkpoint_every",
        f"a resumed learner publishes its version anew: make it a multiple of publish_every={learner.publish_every}",
    )
    require(
        config.scoring.timeout_s < config.scoring.stall_s,
        config,
        "scoring.timeout_s",
        f"a scorer that gives nothing for longer counts as hung: stay under scoring.stall_s={config.scoring.stall_s}",
    )
    require(
        not config.implicit.train or config.algorithm.advantage.name == "prime",
        config,
        "implicit.train",
        f"algorithm.advantage={config.algorithm.advantage.name} does not read it; use algorithm=prime",
    )
    require(actor.temperature > 0, config, "actor.temperature", "training samples; 0 (greedy) has no exploration")
    require(
        learner.eval_every == 0 or config.data.eval is not None,
        config,
        "learner.eval_every",
        "evaluation needs data.eval, a Parquet file of held-out tasks",
    )


def _check_replay(config: TrainConfig) -> None:
    replay, data = config.replay, config.data
    groups = config.learner.batch_size // config.learner.group_size
    require(replay.oversample >= 1, config, "replay.oversample", "1 starts as many episodes as are trained")
    require(
        replay.shards <= groups,
        config,
        "replay.shards",
        f"every shard gives some of the {groups} groups of a batch; use at most so many",
    )
    share = "above half of the store there is little room for training"
    require(replay.dead_letter_share <= 0.5, config, "replay.dead_letter_share", share)
    require(replay.shard < replay.shards, config, "replay.shard", f"shards count from 0 to {replay.shards - 1}")
    require(
        len(data.band) in (0, 2) and sorted(data.band) == list(data.band),
        config,
        "data.band",
        "give the lowest and the highest success rate, such as [0.1,0.9]",
    )
    require(all(weight > 0 for weight in data.weights.values()), config, "data.weights", "weights must be positive")
    require(
        replay.source is None or Path(replay.source).is_dir(),
        config,
        "replay.source",
        "name the replay folder of a finished run, such as runs/NAME/replay",
    )


def _check_files(config: TrainConfig) -> None:
    for key in ("data.train", "data.eval"):
        path = value(config, key)
        require(
            path is None or Path(path).is_file(), config, key, "there is no such file; see docs/quick_start.md for data"
        )


def _check_weights(config: TrainConfig) -> None:
    weights, network = config.weights, config.network
    require(
        weights.fallback != weights.channel, config, "weights.fallback", "it must be another one than weights.channel"
    )
    require(
        weights.channel != "distributed" or weights.fallback != "none",
        config,
        "weights.fallback",
        "an engine that joins between two broadcasts needs one: zmq or disk",
    )
    if weights.channel == "distributed":
        check_bind(network.host, network.insecure, fix=GROUP_FIX)
    if "distributed" in weights.transports:
        for url in config.engine.urls:
            check_bind(urlsplit(url).hostname or "", network.insecure, key="engine.urls", fix=SERVER_GROUP_FIX)


def check_bind(
    host: str, insecure: bool, secured: bool = False, key: str = "network.host", fix: str = KEYS_FIX
) -> None:
    """Refuse to listen where strangers can reach us, without keys (`secured`) or leave. Raises ConfigError."""
    if not (is_loopback(host) or secured or insecure):
        raise ConfigError(f"{key}={host} can be reached from other machines: {fix}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
