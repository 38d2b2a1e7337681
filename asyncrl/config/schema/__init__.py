"""The schema of the whole configuration, which every role reads. Each section is a dataclass.

Every option carries its meaning and its constraint; docs/configuration.md is generated from them. `refusals.py` refuses
values that break a constraint, and combinations that cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.schema.actor import ActorConfig
from asyncrl.config.schema.cluster import ClusterConfig, NetworkConfig
from asyncrl.config.schema.engine import EngineConfig, ServerConfig, WeightsConfig
from asyncrl.config.schema.learner import (
    AlgorithmConfig,
    CriticConfig,
    DemonstrationConfig,
    ImplicitConfig,
    LearnerConfig,
    PartConfig,
    SftConfig,
)
from asyncrl.config.schema.lora import LoraConfig
from asyncrl.config.schema.replay import FilterConfig, OldGroupsConfig, ReplayConfig, SamplerConfig
from asyncrl.config.schema.run import DataConfig, ImagesConfig, ModelConfig, ObserveConfig, RunConfig
from asyncrl.config.schema.scoring import (
    GuardConfig,
    ManagerConfig,
    OutcomeModelConfig,
    ScoringConfig,
    ScoringModelConfig,
    ShapingConfig,
)


@dataclass
class TrainConfig:
    """All sections of the configuration."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    @property
    def can_mask(self) -> bool:
        """True if tokens that are too old may be masked. A run that trains an implicit process model must not mask
        them, because this model learns from whole episodes."""
        return self.replay.can_mask and not self.implicit.train
