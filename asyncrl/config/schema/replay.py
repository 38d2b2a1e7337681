"""The queue between generation and training."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.option import option


@dataclass
class FilterConfig:
    """Complete groups that are not worth training; each is counted by its reason and replaced."""

    zero_variance: bool = option(False, "refuse groups whose rewards are all the same")
    min_reward: float | None = option(None, "refuse groups with a lower mean reward")
    max_reward: float | None = option(None, "refuse groups with a higher mean reward")
    max_tokens: int | None = option(None, "refuse groups with a longer member", "[1, inf)")


@dataclass
class SamplerConfig:
    """Which of the complete groups make the next batch."""

    kind: str = option("fifo", "in which order complete groups are taken", choices=("fifo", "freshest", "prioritised"))
    alpha: float = option(0.6, "prioritised: P(group) is proportional to (spread of its rewards)^alpha", "[0, inf)")
    beta: float = option(0.4, "prioritised: exponent of the importance weights; 1 corrects in full", "[0, inf)")
    max_times_sampled: int = option(1, "batches that one group may be in", "[1, inf)")


@dataclass
class ReplayConfig:
    """The queue between generation and training."""

    max_lag: int = option(
        2, "versions that a trained token may be older than the learner; 0 is synchronous", "[0, inf)"
    )
    durability: str = option(
        "fsync", "what an acknowledgement survives: fsync (power loss) | os (a killed process)", choices=("fsync", "os")
    )
    lease_s: float = option(
        30.0, "seconds after which a silent actor's or scorer's work is given to another", "(0, inf)"
    )
    max_attempts: int = option(
        3, "times that an episode or its scoring is tried before its group is dropped", "[1, inf)"
    )
    max_store_gb: float = option(
        64.0, "largest size of one shard's store on disk; above 0.8 of it tickets stop", "(0, inf)"
    )
    max_dead_letters: int = option(
        10_000, "dead letters kept on one shard; the oldest make room for new ones", "[1, inf)"
    )
    dead_letter_share: float = option(
        0.1, "share of replay.max_store_gb that dead letters and their episodes may take", "(0, 0.5]"
    )
    retention: str = option(
        "none",
        "trajectories kept after all kept checkpoints cover them; window: those of the last retention_steps",
        choices=("none", "window", "all"),
    )
    retention_steps: int = option(100, "learner steps that retention=window keeps", "[1, inf)")
    reissue_evicted: bool = option(False, "run the task of an evicted group again")
    oversample: float = option(
        1.0, "episodes started for one that is trained, so that filtered batches fill at once", "[1, inf)"
    )
    filter: FilterConfig = field(default_factory=FilterConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    shards: int = option(1, "replay processes; each has its own part of tasks, groups and batches", "[1, inf)")
    shard: int = option(0, "which of them `asyncrl replay` serves; `asyncrl train` sets it", "[0, inf)")
    source: str | None = option(None, "store of a finished run: the learner trains its plans again, without actors")
