"""The combinations that cannot work, of options that divide a model among the learner's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.config.schema import ClusterConfig, LearnerConfig, LoraConfig, ModelConfig


def rank_conflicts(
    learner: LearnerConfig, cluster: ClusterConfig, model: ModelConfig, adapters: Mapping[str, LoraConfig]
) -> Iterator[str]:
    """The reasons why copies, context, experts and layers cannot be divided among the ranks.

    `adapters` maps the section of each model to the model's LoRA settings.
    """
    ranks = learner.nodes * cluster.ranks if cluster.learner_ranks is not None else None
    if ranks is not None and ranks % learner.replicas:
        yield (
            f"learner.replicas cluster.learner_ranks: each copy gets an equal number of ranks; use a divisor of {ranks}"
        )
    if learner.context_ranks > 1:
        yield from _whole_attention(model.attention, "learner.context_ranks")
    if learner.expert_ranks > 1:
        yield from _adapters(adapters, "learner.expert_ranks", "a model with adapters gathers its experts")
    if learner.tensor_ranks > 1:
        key = "learner.tensor_ranks"
        yield from _whole_attention(model.attention, key)
        yield from _adapters(adapters, key, "the matrices of adapters cannot be divided")
        if model.dtype == "float16":
            yield f"model.dtype {key}: no test has divided layers in float16; use bfloat16"
        for other in ("context_ranks", "expert_ranks"):
            if getattr(learner, other) > 1:
                yield f"learner.{other} {key}: these two cannot be combined; set one of them to 1"
    if ranks is not None and ranks % learner.replicas == 0:
        yield from _groups(learner, ranks // learner.replicas)


def _whole_attention(attention: str, key: str) -> Iterator[str]:
    if attention in ("flash_attention_2", "flex_attention"):
        yield f"model.attention {key}: this attention cannot share a sequence between ranks; use auto or sdpa"


def _adapters(adapters: Mapping[str, LoraConfig], key: str, why: str) -> Iterator[str]:
    for section, lora in adapters.items():
        if lora.is_used:
            yield f"{section}.lora.{lora.given_by} {key}: {why}; set the second to 1"


def _groups(learner: LearnerConfig, of_copy: int) -> Iterator[str]:
    """The options whose groups of ranks do not divide the `of_copy` ranks of one copy of the model."""
    for name in ("context_ranks", "expert_ranks", "tensor_ranks"):
        if of_copy % (count := getattr(learner, name)):
            yield (
                f"learner.{name} learner.replicas cluster.learner_ranks: a copy of the model has {of_copy} ranks, and "
                f"the first key must divide this number; start a multiple of {count * learner.replicas} ranks, or use "
                f"a divisor of {of_copy}"
            )
