"""The queue between generation and training."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.schema.option import option


@dataclass
class FilterConfig:
    """Complete groups that are not worth training; each is counted by its reason and replaced."""

    zero_variance: bool = option(False, "refuse groups whose rewards are all the same")
    min_reward: float | None = option(None, "refuse groups with a lower mean reward")
    max_reward: float | None = option(None, "refuse groups with a higher mean reward")
    max_tokens: int | None = option(None, "refuse groups with a longer member")


@dataclass
class SamplerConfig:
    """Which of the complete groups make the next batch."""

    kind: str = option("fifo", "order: fifo | freshest | prioritised")
    alpha: float = option(0.6, "prioritised: P(group) is proportional to (spread of its rewards)^alpha")
    beta: float = option(0.4, "prioritised: exponent of the importance weights; 1 corrects in full")
    max_times_sampled: int = option(1, "batches that one group may be in")


@dataclass
class ReplayConfig:
    """The queue between generation and training."""

    max_lag: int = option(2, "versions that a trained token may be older than the learner; 0 is synchronous")
    durability: str = option("fsync", "what an acknowledgement survives: fsync (power loss) | os (a killed process)")
    lease_s: float = option(30.0, "seconds after which a silent actor's or scorer's work is given to another")
    max_attempts: int = option(3, "times that an episode or its scoring is tried before its group is dropped")
    max_store_gb: float = option(64.0, "largest size of one shard's store on disk; above 0.8 of it tickets stop")
    max_dead_letters: int = option(10_000, "dead letters kept on one shard; the oldest make room for new ones")
    dead_letter_share: float = option(0.1, "share of replay.max_store_gb that dead letters and their episodes may take")
    retention: str = option("none", "trajectories kept after all kept checkpoints cover them: none | window | all")
    retention_steps: int = option(100, "learner steps that retention=window keeps")
    reissue_evicted: bool = option(False, "run the task of an evicted group again")
    oversample: float = option(1.0, "episodes started for one that is trained, so that filtered batches fill at once")
    filter: FilterConfig = field(default_factory=FilterConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    shards: int = option(1, "replay processes; each has its own part of tasks, groups and batches")
    shard: int = option(0, "which of them `asyncrl replay` serves; `asyncrl train` sets it")
    source: str | None = option(None, "store of a finished run: the learner trains its plans again, without actors")
