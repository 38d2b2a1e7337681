"""Translates the keys of verl that say which ranks share one model, and which pools of GPUs several roles have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.compat.rows import Row, Setting, alias, made, used
from asyncrl.compat.verl.configuration.actor_rows import ACTOR
from asyncrl.compat.verl.configuration.model_rows import attention_of, has_adapters
from asyncrl.compat.verl.configuration.reward_rows import MANAGER
from asyncrl.compat.verl.configuration.reward_rows import MODEL as REWARD
from asyncrl.compat.verl.configuration.source import VerlConfig
from asyncrl.compat.verl.rewards.process_keys import KEYS

ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
RANKS: Mapping[str, tuple[str, ...]] = {
    "context": (
        ULYSSES,
        f"{ACTOR}.megatron.context_parallel_size",
        f"{ACTOR}.torchtitan.context_parallel_size",
        f"{ACTOR}.veomni.ulysses_parallel_size",
    ),
    "tensor": (f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.torchtitan.tensor_parallel_size"),
    "expert": (
        f"{ACTOR}.megatron.expert_model_parallel_size",
        f"{ACTOR}.torchtitan.expert_parallel_size",
        f"{ACTOR}.veomni.expert_parallel_size",
    ),
    "pipeline": (f"{ACTOR}.megatron.pipeline_model_parallel_size", f"{ACTOR}.torchtitan.pipeline_parallel_size"),
}
"""Maps each kind of ranks that share a model to verl's keys for their number, which differ by engine."""
GPUS, HOSTS = "trainer.n_gpus_per_node", "trainer.nnodes"
ROLLOUT = "actor_rollout_ref.rollout"
WHOLE_SEQUENCES = ("flash_attention_2", "flex_attention")
"""Attention implementations with which ranks cannot share a sequence."""


def _ranks(source: VerlConfig) -> Iterator[Setting | str]:
    key, count = {}, {}
    for kind, keys in RANKS.items():
        key[kind] = max(keys, key=lambda each: source[each] or 1)
        count[kind] = source[key[kind]] or 1
    if count["pipeline"] > 1:
        yield (
            f"{key['pipeline']}={count['pipeline']}: there are no pipeline stages here; the learner divides weights "
            "among its ranks anyway"
        )
    adapters = has_adapters(source)
    if count["tensor"] > 1 and (adapters or count["context"] > 1 or count["expert"] > 1):
        others = "adapters" if adapters else "learner.context_ranks and learner.expert_ranks"
        yield (
            f"{key['tensor']}={count['tensor']}: learner.tensor_ranks cannot be combined with {others}, so "
            "learner.context_ranks is multiplied by this number instead"
        )
        count["context"] *= count["tensor"]
        count["tensor"] = 1
    if count["expert"] > 1 and adapters:
        yield f"{key['expert']}={count['expert']}: with adapters, ranks share no experts; learner.expert_ranks is 1"
        count["expert"] = 1
    yield from ((f"learner.{kind}_ranks", count[kind]) for kind in ("context", "tensor", "expert") if count[kind] > 1)
    if count["context"] * count["tensor"] > 1 and (attention := attention_of(source)) in WHOLE_SEQUENCES:
        yield "model.attention", "auto"
        yield f"attn_implementation={attention}: ranks cannot share a sequence with it, so model.attention is auto"


def _pools(source: VerlConfig) -> Iterator[Setting | str]:
    own = {}
    if source[f"{REWARD}.enable_resource_pool"] and (source[f"{REWARD}.enable"] or source[MANAGER] in KEYS):
        own["scoring"] = (f"{REWARD}.nnodes", f"{REWARD}.n_gpus_per_node")
    if source[f"{ROLLOUT}.nnodes"]:
        own["actor"] = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
    gpus, hosts = source[GPUS], source[HOSTS]
    pools = {"train": {"nodes": hosts, "gpus": gpus}}
    for role, (nodes, size) in own.items():
        wanted = {"nodes": source[nodes], "gpus": source[size] or gpus}
        if min(wanted.values()) > 0:
            pools[role] = wanted
        else:
            yield f"{nodes}={source[nodes]}, {size}={source[size]}: both must be above 0 for a pool of GPUs"
    if len(pools) > 1:
        yield "cluster.pools", pools
        hosts = sum(pool["nodes"] for pool in pools.values())
    elif source.says(GPUS):
        yield "cluster.gpus", gpus
    if any(pool["nodes"] > 1 for pool in pools.values()):
        yield (
            f"{HOSTS}={source[HOSTS]}: the experiment file is for one host; for {hosts} hosts, set cluster.launcher to "
            "hosts, ray or slurm (docs/cluster.md)"
        )


def _other_ranks() -> Iterator[Row]:
    here = {
        "context": ("`learner.context_ranks`", "The number of ranks that share the tokens of a pass."),
        "tensor": (
            "`learner.tensor_ranks`",
            "The number of ranks that share the matrices of a layer. With adapters, context ranks or expert ranks, "
            "this number multiplies `learner.context_ranks` instead.",
        ),
        "expert": (
            "`learner.expert_ranks`",
            "The number of ranks that share the experts; with adapters, it becomes 1.",
        ),
        "pipeline": ("", "There are no pipeline stages: weights are divided among all ranks. The report says so."),
    }
    for kind, keys in RANKS.items():
        for key in keys:
            if key != ULYSSES:
                yield used(key, *here[kind][:1], 1, here[kind][1])


ROWS = (
    made(
        ULYSSES,
        "`learner.context_ranks`",
        1,
        "The number of ranks that share the tokens of a pass. As in verl, `ppo_max_token_len_per_gpu` counts the "
        "tokens of one rank.",
        _ranks,
    ),
    *_other_ranks(),
    made(
        GPUS,
        "`cluster.gpus`, `cluster.pools`",
        8,
        "Copied if your configuration sets it. With a pool for rewards or for rollouts, it is the number of GPUs on "
        "each node of the pool `train`.",
        _pools,
    ),
    used(
        HOSTS,
        "`cluster.pools`",
        1,
        "With a pool for rewards or for rollouts, the number of nodes of the pool `train`. The experiment file is for "
        "one host; for several, set `cluster.launcher` (docs/cluster.md).",
    ),
    used(
        f"{REWARD}.enable_resource_pool",
        "`cluster.pools`",
        False,
        "True: scorers with a reward model have a pool of their own, `scoring`, in addition to the GPUs of `trainer`.",
    ),
    used(f"{REWARD}.nnodes", "`cluster.pools`", 0, "The number of nodes of the pool `scoring`."),
    used(f"{REWARD}.n_gpus_per_node", "`cluster.pools`", 8, "The GPUs on each node of the pool `scoring`."),
    used(
        f"{ROLLOUT}.nnodes",
        "`cluster.pools`",
        0,
        "Above 0: actors with their servers have a pool of their own, `actor`. With 0 asyncrl divides the GPUs between "
        "servers and learner.",
    ),
    used(f"{ROLLOUT}.n_gpus_per_node", "`cluster.pools`", None, "The GPUs on each node of the pool `actor`."),
    *(
        alias(f"reward_model.{name}", f"{REWARD}.{name}")
        for name in ("enable_resource_pool", "nnodes", "n_gpus_per_node")
    ),
)
