"""The queue between generation and training."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.option import option


@dataclass
class FilterConfig:
    """Conditions under which a complete group is dropped untrained. Dropped groups are counted by reason and
    replaced."""

    zero_variance: bool = option(False, "refuse groups whose members all have the same score")
    score: str = option(
        "reward",
        "the score that zero_variance compares; reward: the final reward; outcome: the outcome before shaping, as in "
        "DAPO",
        choices=("reward", "outcome"),
    )
    min_reward: float | None = option(None, "refuse groups with a lower mean reward")
    max_reward: float | None = option(None, "refuse groups with a higher mean reward")
    max_tokens: int | None = option(None, "refuse groups that have a trajectory of more tokens", "[1, inf)")
    max_refused: int | None = option(
        256,
        "the run ends, and tells the reason, once filters have refused this many groups, and at least two batches, in "
        "a row (docs/faults.md#filters-refuse-every-group); null: never",
        "[1, inf)",
    )


@dataclass
class SamplerConfig:
    """The rule by which complete groups are selected for the next batch."""

    kind: str = option(
        "oldest",
        "which groups are trained first (docs/replay.md)",
        choices=("oldest", "fifo", "freshest", "prioritised"),
    )
    alpha: float = option(0.6, "prioritised: P(group) is proportional to (spread of its rewards)^alpha", "[0, inf)")
    beta: float = option(
        0.4, "prioritised: exponent of the importance weights; 1 corrects the sampling bias completely", "[0, 1]"
    )
    max_times_sampled: int = option(
        1,
        "number of batches in which a group may be trained",
        "[1, inf)",
        fixed="the age bound counts this number of uses for each stored group",
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
        "fsync: stored data survive a power loss; os: they survive a killed process, but not a power loss",
        choices=("fsync", "os"),
    )
    lease_s: float = option(
        30.0, "seconds without a request of a worker after which its tasks go to other workers", "(0, inf)"
    )
    max_attempts: int = option(3, "attempts at an episode, or at its scoring, before its group is dropped", "[1, inf)")
    max_store_gb: float = option(
        64.0, "largest size of a shard's store in GB; above 0.8 of it, no new episodes start", "(0, inf)"
    )
    max_dead_letters: int = option(
        10_000, "dead letters (failed trajectories) that a shard keeps; the oldest are deleted first", "[1, inf)"
    )
    dead_letter_share: float = option(0.1, "largest share of max_store_gb for dead letters", "(0, 0.5]")
    retention: str = option(
        "none",
        "trajectories that the store keeps; none: only untrained ones; window: also the trained ones of the last "
        "retention_steps steps; all: every one",
        choices=("none", "window", "all"),
    )
    retention_steps: int = option(100, "learner steps that retention=window keeps", "[1, inf)")
    reissue_evicted: bool = option(False, "if a group is evicted because of its age, run its task again")
    oversample: float = option(1.0, "episodes started per trained episode, to make up for refused groups", "[1, inf)")
    spare_batches: float | None = option(
        0.5,
        "complete batches that may wait in addition to the next one; if more wait, fewer episodes start; null: start "
        "all that max_lag allows. No effect with freshest, prioritised or max_times_sampled above 1",
        "[0, inf)",
    )
    filter: FilterConfig = field(default_factory=FilterConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    shards: int = option(
        1,
        "number of replay processes; each has its own tasks, groups and share of a batch",
        "[1, inf)",
        fixed="the shard of a stored group is the group's number modulo this value",
    )
    shard: int = option(0, "index of the shard that `asyncrl replay` serves; `asyncrl train` sets it", "[0, inf)")
    source: str | None = option(
        None,
        "replay folder of a finished run: the learner trains the recorded batches again, without actors",
        fixed="all batches of the run come from this store",
    )

    @property
    def can_pace(self) -> bool:
        """True if each complete group is trained once and in order, so that waiting groups count as coming batches."""
        return self.sampler.max_times_sampled == 1 and self.sampler.kind in ("oldest", "fifo")
