"""What a configuration must satisfy beyond its types. Each refusal names the key, its value and the fix."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.engine_checks import check_engine
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.needs import configured

_DTYPES = ("float32", "bfloat16", "float16")
_LONG_INPUTS = ("refuse", "drop_oldest")

CHOICES: dict[str, Sequence[str]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.attention": ("sdpa", "flash_attention_2", "flex_attention"),
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
    "replay.lease_s",
    "replay.max_attempts",
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
DOOR_FIX = "agents are answered over plain HTTP; use 127.0.0.1, or network.insecure=true on a network that you trust"


def check(config: TrainConfig) -> None:
    """Refuse impossible values and combinations before anything starts. Raises ConfigError."""
    for key, allowed in CHOICES.items():
        _require(value(config, key) in allowed, config, key, f"use one of {', '.join(allowed)}")
    for key in POSITIVE:
        _require(value(config, key) > 0, config, key, "it must be positive")
    for key in NOT_NEGATIVE:
        _require(value(config, key) >= 0, config, key, "it must be 0 or more")
    _check_combinations(config)
    check_engine(config)
    _check_scoring(config)
    _check_shaping(config)
    _check_replay(config)
    _check_files(config)
    network = config.network
    _require(network.max_message_mb <= MAX_FRAME_MB, config, "network.max_message_mb", f"at most {MAX_FRAME_MB} fit")
    check_bind(network.host, network.insecure, secured=network.keys is not None)
    check_bind(config.actor.door_host, network.insecure, key="actor.door_host", fix=DOOR_FIX)
    _check_weights(config)


def value(config: TrainConfig, key: str) -> Any:
    """The value at a dotted key."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _require(condition: bool, config: TrainConfig, key: str, fix: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value(config, key)}: {fix}")


def _check_combinations(config: TrainConfig) -> None:
    learner, actor = config.learner, config.actor
    batch, group = learner.batch_size, learner.group_size
    next_multiple = -(-batch // group) * group
    _require(
        batch % group == 0,
        config,
        "learner.batch_size",
        f"groups are whole, so it must be a multiple of learner.group_size={group}, such as {next_multiple}",
    )
    _require(
        batch % learner.minibatches == 0,
        config,
        "learner.minibatches",
        f"it must divide learner.batch_size={batch}",
    )
    _require(
        config.engine.kind != "embedded" or actor.max_tokens <= config.engine.max_length,
        config,
        "actor.max_tokens",
        f"a slot of the engine holds engine.max_length={config.engine.max_length} tokens; raise that or lower this",
    )
    _require(
        learner.steps % learner.publish_every == 0,
        config,
        "learner.steps",
        f"the last weights must be published: make it a multiple of learner.publish_every={learner.publish_every}",
    )
    _require(
        learner.checkpoint_every % learner.publish_every == 0,
        config,
        "learner.checkpoint_every",
        f"a resumed learner publishes its version anew: make it a multiple of publish_every={learner.publish_every}",
    )
    _require(
        config.scoring.timeout_s < config.scoring.stall_s,
        config,
        "scoring.timeout_s",
        f"a scorer that gives nothing for longer counts as hung: stay under scoring.stall_s={config.scoring.stall_s}",
    )
    _require(
        not config.implicit.train or config.algorithm.advantage.name == "prime",
        config,
        "implicit.train",
        f"algorithm.advantage={config.algorithm.advantage.name} does not read it; use algorithm=prime",
    )
    _require(actor.temperature > 0, config, "actor.temperature", "training samples; 0 (greedy) has no exploration")
    _require(
        learner.eval_every == 0 or config.data.eval is not None,
        config,
        "learner.eval_every",
        "evaluation needs data.eval, a Parquet file of held-out tasks",
    )


def _check_scoring(config: TrainConfig) -> None:
    scoring, known = config.scoring, configured(config.scoring)
    named = ", ".join(known)
    for source, kinds in scoring.needs.items():
        fix = f"{source} must name some of the kinds that are configured: {named}"
        _require(bool(kinds) and set(kinds) <= set(known), config, "scoring.needs", fix)
        fix = f"nothing would be left to train {source} on: let it need rules"
        _require(not scoring.shadow or "rules" in kinds, config, "scoring.shadow", fix)
    fix = f"name some of the kinds that are configured: {named}"
    _require(set(scoring.serve) <= set(known), config, "scoring.serve", fix)
    split = config.actor.step_split
    fix = "use turn, paragraph or line, or the dotted path of a function"
    _require(split in ("turn", "paragraph", "line") or "." in split, config, "actor.step_split", fix)


def _check_shaping(config: TrainConfig) -> None:
    shaping, key = config.scoring.shaping, "scoring.shaping."
    fix = "step scores need scoring.prm.path, the folder or hub name of a process reward model"
    _require(shaping.process_weight == 0 or config.scoring.prm.path is not None, config, key + "process_weight", fix)
    fix = "nothing else would be left to train on: give a weight to the outcome"
    rewarded = bool(shaping.outcome_weight or shaping.environment_weight or shaping.prm_acc_bonus_weight)
    _require(not config.scoring.shadow or rewarded, config, "scoring.shadow", fix)
    fix = "a product of negative scores means nothing; use min, or the model's probabilities"
    signed = shaping.use_logit_tanh and shaping.prm_aggregation == "product"
    _require(not signed, config, key + "prm_aggregation", fix)
    fix = "the members of a group are compared by the learner: add {name: best_of_n} to algorithm.reward"
    compared = any(choice.name == "best_of_n" for choice in config.algorithm.reward)
    _require(shaping.prm_aggregation != "best_of_n" or compared, config, key + "prm_aggregation", fix)
    fix = "it must be a list of clip and delta"
    _require(set(shaping.step_transforms) <= {"clip", "delta"}, config, key + "step_transforms", fix)
    fix = "it is a penalty: make it 0 or less"
    _require(shaping.incorrect_answer_penalty <= 0, config, key + "incorrect_answer_penalty", fix)
    fix = f"with overlong_penalty set it must be at least overlong_buffer={shaping.overlong_buffer}"
    bounded = not shaping.overlong_penalty or shaping.overlong_buffer <= shaping.overlong_max_length
    _require(bounded, config, key + "overlong_max_length", fix)
    _require(_compiles(shaping.answer_pattern), config, key + "answer_pattern", "it is no regular expression of Python")


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _check_replay(config: TrainConfig) -> None:
    replay, data = config.replay, config.data
    groups = config.learner.batch_size // config.learner.group_size
    _require(replay.oversample >= 1, config, "replay.oversample", "1 starts as many episodes as are trained")
    _require(
        replay.shards <= groups,
        config,
        "replay.shards",
        f"every shard gives some of the {groups} groups of a batch; use at most so many",
    )
    _require(replay.shard < replay.shards, config, "replay.shard", f"shards count from 0 to {replay.shards - 1}")
    _require(
        len(data.band) in (0, 2) and sorted(data.band) == list(data.band),
        config,
        "data.band",
        "give the lowest and the highest success rate, such as [0.1,0.9]",
    )
    _require(all(weight > 0 for weight in data.weights.values()), config, "data.weights", "weights must be positive")
    _require(
        replay.source is None or Path(replay.source).is_dir(),
        config,
        "replay.source",
        "name the replay folder of a finished run, such as runs/NAME/replay",
    )


def _check_files(config: TrainConfig) -> None:
    for key in ("data.train", "data.eval"):
        path = value(config, key)
        _require(
            path is None or Path(path).is_file(), config, key, "there is no such file; see docs/quick_start.md for data"
        )


def _check_weights(config: TrainConfig) -> None:
    weights, network = config.weights, config.network
    _require(
        weights.fallback != weights.channel, config, "weights.fallback", "it must be another one than weights.channel"
    )
    _require(
        weights.channel != "distributed" or weights.fallback != "none",
        config,
        "weights.fallback",
        "an engine that joins between two broadcasts needs one: zmq or disk",
    )
    if weights.channel == "distributed":
        check_bind(network.host, network.insecure, fix=GROUP_FIX)


def check_bind(
    host: str, insecure: bool, secured: bool = False, key: str = "network.host", fix: str = KEYS_FIX
) -> None:
    """Refuse to listen where strangers can reach us, without keys (`secured`) or leave. Raises ConfigError."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not (local or secured or insecure):
        raise ConfigError(f"{key}={host} can be reached from other machines: {fix}")
