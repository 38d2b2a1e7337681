"""Which ways of dividing a model among the learner's ranks go together."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import TrainConfig


def rank_conflicts(config: TrainConfig) -> Iterator[str]:
    """Why copies, context, experts and layers cannot be divided among the ranks as `config` says."""
    learner = config.learner
    ranks = learner.nodes * config.cluster.ranks
    if config.cluster.learner_ranks is not None and ranks % learner.replicas:
        yield f"learner.replicas cluster.learner_ranks: copies have equal shares of the ranks; use a divisor of {ranks}"
    if learner.context_ranks > 1:
        yield from _whole_attention(config, "learner.context_ranks")
    if learner.expert_ranks > 1:
        yield from _adapters(config, "learner.expert_ranks", "a model with adapters gathers its experts")
    if learner.tensor_ranks > 1:
        yield from _tensor_ranks(config)
    for key in ("context_ranks", "expert_ranks", "tensor_ranks"):
        yield from _groups(config, f"learner.{key}", getattr(learner, key), ranks)


def _tensor_ranks(config: TrainConfig) -> Iterator[str]:
    key = "learner.tensor_ranks"
    yield from _whole_attention(config, key)
    yield from _adapters(config, key, "the matrices of adapters cannot be divided")
    if config.model.dtype == "float16":
        yield f"model.dtype {key}: no test has divided layers in float16; use bfloat16"
    for other in ("context_ranks", "expert_ranks"):
        if getattr(config.learner, other) > 1:
            yield f"learner.{other} {key}: ranks divide passes in one of these ways; set the other to 1"


def _whole_attention(config: TrainConfig, key: str) -> Iterator[str]:
    if config.model.attention in ("flash_attention_2", "flex_attention"):
        yield f"model.attention {key}: this attention takes the tokens of one rank only; use auto or sdpa"


def _adapters(config: TrainConfig, key: str, why: str) -> Iterator[str]:
    adapters = {"model": config.model.lora, "critic": config.critic.lora, "implicit": config.implicit.lora}
    for section, lora in adapters.items():
        if lora.is_used:
            yield f"{section}.lora.rank {key}: {why}; use 1"


def _groups(config: TrainConfig, key: str, count: int, ranks: int) -> Iterator[str]:
    replicas = config.learner.replicas
    of_copy = ranks // replicas
    if config.cluster.learner_ranks is not None and ranks % replicas == 0 and of_copy % count:
        yield (
            f"{key} learner.replicas cluster.learner_ranks: groups are equal parts of the ranks of a copy of the "
            f"model, which has {of_copy}; start a multiple of {count * replicas} ranks, or use a divisor of {of_copy}"
        )
