"""The combinations of options of the learner, of its critic and of adapters that cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.config.checks.deployment import hosts_conflicts
from asyncrl.config.checks.ranks import rank_conflicts
from asyncrl.config.schema import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    ImplicitConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ObserveConfig,
    ReplayConfig,
    TrainConfig,
)

_OF_ADAPTERS = ("rank", "alpha", "rslora", "targets")
"""The options that a folder of adapters (`path`) sets itself."""


def learner_conflicts(config: TrainConfig) -> Iterator[str]:
    """The combinations that cannot work, of options of `learner`, `critic`, `implicit` and adapters."""
    learner, model, critic, implicit = config.learner, config.model, config.critic, config.implicit
    adapters = {"model": model.lora, "critic": critic.lora, "implicit": implicit.lora}
    # `asyncrl train` computes the steps from epochs once it has read the data. Then it checks the steps.
    steps = 0 if learner.epochs is not None else learner.total_steps
    yield from _batch(learner, config.engine.return_routed_experts or config.replay.source is not None)
    yield from _epochs(learner, config.data, config.replay, config.cluster.launcher)
    yield from _versions(learner, steps)
    yield from hosts_conflicts(learner, config.network)
    yield from rank_conflicts(learner, config.cluster, model, adapters)
    yield from _kernels(learner, model.attention)
    yield from _shared_critic(critic, model.lora)
    yield from _lengths(learner, critic.warmup_steps, config.observe, steps)
    yield from _evaluations(learner, has_tasks=config.data.eval is not None)
    yield from _adapters({"model": model, "critic": critic, "implicit": implicit})
    yield from _adapters_of_policy(model.lora, learner, config.algorithm)
    if implicit.train and config.algorithm.advantage.name != "prime":
        yield "implicit.train algorithm.advantage.name: only the advantage prime reads this model; use algorithm=prime"


def _batch(learner: LearnerConfig, records_experts: bool) -> Iterator[str]:
    batch, group = learner.batch_size, learner.group_size
    if batch % group:
        multiple = -(-batch // group) * group
        yield (
            f"learner.batch_size learner.group_size: a batch consists of whole groups; use a multiple of {group}, such "
            f"as {multiple}"
        )
    if batch % learner.minibatches:
        yield "learner.minibatches learner.batch_size: the first must divide the second"
    if learner.router_replay and not records_experts:
        yield (
            "learner.router_replay engine.return_routed_experts: there are no experts to replay; set the second key too"
        )


def _epochs(learner: LearnerConfig, data: DataConfig, replay: ReplayConfig, launcher: str) -> Iterator[str]:
    if learner.epochs is None:
        return
    if learner.steps is not None:
        yield "learner.epochs learner.steps: the steps follow from the epochs; set one of the two to null"
    if data.weights:
        yield "learner.epochs data.weights: weighted sources do not finish an epoch together; set learner.steps instead"
    if data.band:
        yield "learner.epochs data.band: tasks outside the band are skipped; set learner.steps instead"
    if replay.source is not None:
        yield "learner.epochs replay.source: the stored run has a fixed number of steps; set learner.steps instead"
    if learner.nodes > 1 and launcher == "local":
        yield "learner.epochs learner.nodes: the other hosts do not count the tasks; set learner.steps instead"


def _versions(learner: LearnerConfig, steps: int) -> Iterator[str]:
    publish = learner.publish_every
    if steps % publish:
        yield "learner.steps learner.publish_every: the last weights must be published; use a multiple of the second"
    if learner.checkpoint_every % publish:
        yield (
            "learner.checkpoint_every learner.publish_every: a checkpoint must be a published version; use a multiple "
            "of the second"
        )


def _kernels(learner: LearnerConfig, attention: str) -> Iterator[str]:
    if learner.shared_prefixes and attention in ("flash_attention_2", "flex_attention"):
        yield "learner.shared_prefixes model.attention: this attention reads whole sequences only; use null"
    if learner.deterministic and attention == "flex_attention":
        yield "learner.deterministic model.attention: flex attention is not known to repeat bit for bit; use auto"
    if learner.optimizer_on_host and learner.optimizer == "adamw_8bit":
        yield "learner.optimizer_on_host learner.optimizer: moments of 8 bits stay on the GPU; use adamw or muon"
    if len(learner.betas) != 2:
        yield "learner.betas: AdamW takes two numbers, such as [0.9,0.99]"


def _shared_critic(critic: CriticConfig, policy_lora: LoraConfig) -> Iterator[str]:
    if not critic.shared:
        return
    if critic.warmup_steps:
        yield "critic.warmup_steps critic.shared: the warm-up would train the policy's backbone too; set the first to 0"
    if critic.path is not None:
        yield "critic.path critic.shared: the critic has the policy's backbone; set the first to null"
    if critic.freeze:
        yield "critic.freeze critic.shared: the critic has the policy's backbone; use model.freeze"
    for section, lora in (("critic", critic.lora), ("model", policy_lora)):
        if lora.is_used:
            key = f"{section}.lora.{lora.given_by}"
            yield f"critic.shared {key}: no test has trained a shared backbone with adapters; use false"


def _lengths(learner: LearnerConfig, critic_warmup: int, observe: ObserveConfig, steps: int) -> Iterator[str]:
    """The options that name more steps than the run has, and a floor of a learning rate that never falls. `steps` is
    the number of steps of the run. It is 0 if the number is not known yet, or if nothing is trained."""
    if 0 < steps <= critic_warmup:
        yield "critic.warmup_steps learner.steps: the policy would never be trained; lower the first key"
    if 0 < steps < learner.warmup_steps:
        yield "learner.warmup_steps learner.steps: the run would end before its full learning rate; lower the first key"
    for key in ("profile_steps", "memory_steps"):
        if 0 < steps <= max(getattr(observe, key), default=0):
            yield f"observe.{key} learner.steps: the run has steps 0 to {steps - 1}; use these numbers"
    if learner.lr_floor and learner.schedule == "constant":
        yield "learner.lr_floor learner.schedule: a constant learning rate has no floor; use linear or cosine"


def _evaluations(learner: LearnerConfig, has_tasks: bool) -> Iterator[str]:
    if learner.eval_every and not has_tasks:
        yield "learner.eval_every data.eval: evaluation needs data.eval, a file of held-out tasks"
    if learner.keep_best and (not learner.eval_every or learner.eval_every % learner.checkpoint_every):
        tasks = "" if has_tasks else ", and name held-out tasks in data.eval"
        yield (
            "learner.keep_best learner.eval_every: each evaluation rates the checkpoint of its step, which must "
            f"exist; set learner.eval_every to a multiple of learner.checkpoint_every={learner.checkpoint_every}{tasks}"
        )


def _adapters(models: Mapping[str, ModelConfig | CriticConfig | ImplicitConfig]) -> Iterator[str]:
    for section, model in models.items():
        lora, key = model.lora, f"{section}.lora"
        given = [f"{key}.{name}" for name in _OF_ADAPTERS if getattr(lora, name) != getattr(LoraConfig(), name)]
        if lora.path is not None and given:
            yield f"{key}.path {' '.join(given)}: the folder sets these values itself; leave out all but path"
        if not lora.is_used and given:
            yield f"{' '.join(given)}: there are no adapters; set {key}.rank, or {key}=null to undo all"
        if lora.path is not None and model.freeze:
            yield f"{section}.freeze {key}.path: only the adapters of the folder are trained; set the first to []"
        elif lora.is_used and model.freeze:
            yield (
                f"{section}.freeze {key}.targets: only adapters are trained; choose the trained layers with the "
                "second key"
            )
        if not lora.targets:
            yield f"{key}.targets: name linear layers, or use all-linear"


def _adapters_of_policy(lora: LoraConfig, learner: LearnerConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    if lora.is_used and algorithm.balance_bias_rate:
        yield (
            f"algorithm.balance_bias_rate model.lora.{lora.given_by}: a run with adapters does not change the biases "
            "of routers; set the first to 0"
        )
    if lora.is_used and learner.reference_on_host:
        yield (
            f"learner.reference_on_host model.lora.{lora.given_by}: the reference is the policy without its adapters, "
            "and needs no extra memory; set the first to false"
        )
