"""The queue between generation and training."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.option import option


@dataclass
class FilterConfig:
    """Complete groups that are not trained. Each is counted by its reason and replaced."""

    zero_variance: bool = option(False, "refuse groups whose members all have the same score")
    score: str = option(
        "reward",
        "the score that zero_variance compares: the labels' reward, or the outcome before any shaping, as in DAPO",
        choices=("reward", "outcome"),
    )
    min_reward: float | None = option(None, "refuse groups with a lower mean reward")
    max_reward: float | None = option(None, "refuse groups with a higher mean reward")
    max_tokens: int | None = option(None, "refuse groups with a longer member", "[1, inf)")


@dataclass
class SamplerConfig:
    """The choice of the complete groups that form the next batch."""

    kind: str = option(
        "oldest",
        "which groups are trained first (docs/replay.md)",
        choices=("oldest", "fifo", "freshest", "prioritised"),
    )
    alpha: float = option(0.6, "prioritised: P(group) is proportional to (spread of its rewards)^alpha", "[0, inf)")
    beta: float = option(0.4, "prioritised: exponent of the importance weights; 1 corrects in full", "[0, 1]")
    max_times_sampled: int = option(
        1, "batches that one group may be in", "[1, inf)", fixed="the age bound counts uses of stored groups"
    )


@dataclass
class ReplayConfig:
    """The queue between generation and training."""

    max_lag: int = option(
        2,
        "age bound: the largest staleness of a trained token, in versions of the policy; 0: synchronous",
        "[0, inf)",
    )
    durability: str = option(
        "fsync",
        "what stored data survive: a power loss (fsync) or a killed process (os)",
        choices=("fsync", "os"),
    )
    lease_s: float = option(30.0, "seconds without a request after which a worker's work goes to others", "(0, inf)")
    max_attempts: int = option(3, "attempts at an episode, or at its scoring, before its group is dropped", "[1, inf)")
    max_store_gb: float = option(
        64.0, "gigabytes of a shard's store; beyond 0.8 of it no new episodes start", "(0, inf)"
    )
    max_dead_letters: int = option(10_000, "newest dead letters that a shard keeps", "[1, inf)")
    dead_letter_share: float = option(0.1, "share of max_store_gb that dead letters may take", "(0, 0.5]")
    retention: str = option(
        "none",
        "trajectories to keep; none: those not yet trained; window: also those of the last retention_steps steps; all",
        choices=("none", "window", "all"),
    )
    retention_steps: int = option(100, "learner steps that retention=window keeps", "[1, inf)")
    reissue_evicted: bool = option(False, "run the task of an evicted group again")
    oversample: float = option(
        1.0, "episodes started for each one that is trained, in case groups are refused", "[1, inf)"
    )
    spare_batches: float | None = option(
        0.5,
        "complete batches, after the one that is trained next, beyond which fewer episodes start; null: start all "
        "that max_lag allows. No effect with freshest, prioritised or max_times_sampled above 1",
        "[0, inf)",
    )
    filter: FilterConfig = field(default_factory=FilterConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    shards: int = option(
        1,
        "replay processes; each has its own tasks, groups and share of a batch",
        "[1, inf)",
        fixed="the shard of a stored group is its number modulo this one",
    )
    shard: int = option(0, "shard that `asyncrl replay` serves; `asyncrl train` sets it", "[0, inf)")
    source: str | None = option(
        None,
        "store of a finished run: the learner trains its plans again, without actors",
        fixed="it names where all of a run's batches come from",
    )

    @property
    def can_pace(self) -> bool:
        """True if complete groups need not wait for a further use, or until the sampler chooses them."""
        return self.sampler.max_times_sampled == 1 and self.sampler.kind in ("oldest", "fifo")
