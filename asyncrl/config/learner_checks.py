"""Which options of the learner, of its critic and of adapters go together."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.deployment_checks import hosts_conflicts
from asyncrl.config.rank_checks import rank_conflicts
from asyncrl.config.schema import CriticConfig, ImplicitConfig, LoraConfig, ModelConfig, TrainConfig

_OF_ADAPTERS = ("rank", "alpha", "rslora", "targets")
"""The options of adapters that a folder of adapters says itself."""


def learner_conflicts(config: TrainConfig) -> Iterator[str]:
    learner = config.learner
    batch, group, publish = learner.batch_size, learner.group_size, learner.publish_every
    if batch % group:
        multiple = -(-batch // group) * group
        yield f"learner.batch_size learner.group_size: groups are whole; use a multiple of {group}, such as {multiple}"
    if batch % learner.minibatches:
        yield "learner.minibatches learner.batch_size: the first must divide the second"
    recorded = config.engine.return_routed_experts or config.replay.source is not None
    if learner.router_replay and not recorded:
        yield "learner.router_replay engine.return_routed_experts: there are no experts to replay; set the second, too"
    yield from _epochs(config)
    # The steps of epochs are not known before a start has seen the data; it checks them then.
    steps = 0 if learner.epochs is not None else learner.total_steps
    if steps % publish:
        yield "learner.steps learner.publish_every: the last weights must be published; use a multiple of the second"
    if learner.checkpoint_every % publish:
        yield "learner.checkpoint_every learner.publish_every: checkpoints are versions; use a multiple of the second"
    if learner.shared_prefixes and config.model.attention in ("flash_attention_2", "flex_attention"):
        yield "learner.shared_prefixes model.attention: this attention reads whole sequences only; use null"
    yield from hosts_conflicts(config)
    yield from rank_conflicts(config)
    if learner.deterministic and config.model.attention == "flex_attention":
        yield "learner.deterministic model.attention: flex attention is not known to repeat bit for bit; use auto"
    if learner.optimizer_on_host and learner.optimizer == "adamw_8bit":
        yield "learner.optimizer_on_host learner.optimizer: moments of 8 bits stay on the GPU; use adamw or muon"
    if len(learner.betas) != 2:
        yield "learner.betas: AdamW takes two, such as [0.9,0.99]"
    # Without training, as in an evaluation, there is nothing to warm up and no step to record.
    critic = config.critic
    if critic.shared:
        if critic.warmup_steps:
            yield "critic.warmup_steps critic.shared: it would train the policy's backbone too; set the first to 0"
        if critic.path is not None:
            yield "critic.path critic.shared: its backbone is the policy's; set the first to null"
        if critic.freeze:
            yield "critic.freeze critic.shared: its backbone is the policy's; use model.freeze"
        for section, lora in (("critic", critic.lora), ("model", config.model.lora)):
            if lora.is_used:
                yield f"critic.shared {section}.lora.rank: no test has trained a shared backbone by adapters; use false"
    if 0 < steps <= critic.warmup_steps:
        yield "critic.warmup_steps learner.steps: the policy would never be trained; lower the first one"
    if 0 < steps < learner.warmup_steps:
        yield "learner.warmup_steps learner.steps: the run would end before its full learning rate; lower the first one"
    for key in ("profile_steps", "memory_steps"):
        if 0 < steps <= max(getattr(config.observe, key), default=0):
            yield f"observe.{key} learner.steps: the run has steps 0 to {steps - 1}; name some of these"
    if learner.lr_floor and learner.schedule == "constant":
        yield "learner.lr_floor learner.schedule: a constant learning rate has no floor; use linear or cosine"
    if learner.eval_every and config.data.eval is None:
        yield "learner.eval_every data.eval: evaluation needs data.eval, a file of held-out tasks"
    if learner.keep_best and (not learner.eval_every or learner.eval_every % learner.checkpoint_every):
        yield (
            "learner.keep_best learner.eval_every: each evaluation must have a checkpoint of its step to rate; set "
            f"learner.eval_every to a multiple of learner.checkpoint_every={learner.checkpoint_every}"
        )
    yield from _adapters(config)
    if config.implicit.train and config.algorithm.advantage.name != "prime":
        yield "implicit.train algorithm.advantage.name: only the advantage prime reads this model; use algorithm=prime"


def _adapters(config: TrainConfig) -> Iterator[str]:
    models: dict[str, ModelConfig | CriticConfig | ImplicitConfig]
    models = {"model": config.model, "critic": config.critic, "implicit": config.implicit}
    for section, model in models.items():
        lora, key = model.lora, f"{section}.lora"
        given = [f"{key}.{name}" for name in _OF_ADAPTERS if getattr(lora, name) != getattr(LoraConfig(), name)]
        if lora.path is not None and given:
            yield f"{key}.path {' '.join(given)}: the folder says this of its adapters; leave out what is beside path"
        if not lora.is_used and given:
            yield f"{' '.join(given)}: there are no adapters; set {key}.rank"
        if lora.is_used and model.freeze:
            yield f"{section}.freeze {key}.targets: adapters alone are trained; say by the second where they are"
        if not lora.targets:
            yield f"{key}.targets: name linear layers, or use all-linear"
    if config.model.lora.is_used and config.algorithm.balance_bias_rate:
        yield (
            "algorithm.balance_bias_rate model.lora.rank: adapters leave the biases of routers as they are; set the "
            "first to 0"
        )
    if config.model.lora.is_used and config.learner.reference_on_host:
        yield (
            "learner.reference_on_host model.lora.rank: the reference is the policy without its adapters, and takes no "
            "memory; set the first to false"
        )


def demonstration_conflicts(config: TrainConfig) -> Iterator[str]:
    sft = config.algorithm.sft
    if sft.path == []:
        yield "algorithm.sft.path: name a file of demonstrations, or several; null: none"
    if sft.steps is not None and sft.schedule == "constant":
        yield "algorithm.sft.steps algorithm.sft.schedule: a constant weight does not fall; use linear or cosine"


def _epochs(config: TrainConfig) -> Iterator[str]:
    if config.learner.epochs is None:
        return
    if config.learner.steps is not None:
        yield "learner.epochs learner.steps: the steps follow from the epochs; set one of the two to null"
    if config.data.weights:
        yield "learner.epochs data.weights: sources with weights pass at different speeds; set learner.steps"
    if config.data.band:
        yield "learner.epochs data.band: tasks outside the band are passed over; set learner.steps"
    if config.replay.source is not None:
        yield "learner.epochs replay.source: the stored run has so many steps; set learner.steps"
    if config.learner.nodes > 1 and config.cluster.launcher == "local":
        yield "learner.epochs learner.nodes: the other hosts do not count the tasks; set learner.steps"
