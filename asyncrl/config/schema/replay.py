"""The queue between generation and training."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.option import option


@dataclass
class FilterConfig:
    """Conditions under which a complete group is dropped, and not trained. Dropped groups are counted by reason, and
    replaced by new groups."""

    zero_variance: bool = option(False, "drop groups whose members all have the same score")
    score: str = option(
        "reward",
        "score that zero_variance compares; reward: the final reward; outcome: the outcome before shaping, as in "
        "DAPO; or the name of a score that every episode has, such as rule/NAME or rule/NAME/NUMBER (docs/scoring.md)",
    )
    min_reward: float | None = option(None, "drop groups whose mean reward is lower than this")
    max_reward: float | None = option(None, "drop groups whose mean reward is higher than this")
    max_tokens: int | None = option(None, "drop groups that have a trajectory of more tokens than this", "[1, inf)")
    max_refused: int | None = option(
        256,
        "the run ends after this many dropped groups in a row, but not before two batches of groups were dropped. "
        "Groups in which all members failed alike count by their members: 40 members count as one group "
        "(docs/faults.md#filters-refuse-every-group); null: no limit",
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
        "maximum number of batches that train the same group",
        "[1, inf)",
        fixed="the age bound counts each stored group this many times",
    )


@dataclass
class OldGroupsConfig:
    """The treatment of groups that are becoming too old for replay.max_lag."""

    wait_s: float | None = option(
        None,
        "largest number of seconds for which a step waits for running groups that would otherwise become too old and "
        "be thrown away (docs/replay.md#groups-that-become-too-old); 0: no wait; null: the duration of a learner "
        "step, or less if the learner seldom lacks a full batch. With null there is no wait if replay.max_lag is 0, "
        "replay.sampler.kind is not oldest, or replay.sampler.max_times_sampled is above 1",
        "[0, inf)",
    )
    mask: bool | None = option(
        None,
        "what happens to a group with tokens that are older than replay.max_lag; true: it is trained, and these tokens "
        "are context without loss; false: it is thrown away; null: true, but false if replay.max_lag is 0, "
        "replay.sampler.max_times_sampled is above 1, or implicit.train is true",
    )


@dataclass
class ReplayConfig:
    """The queue between generation and training."""

    max_lag: int = option(
        2,
        "age bound: largest number of versions by which the policy that sampled a token may be older than the policy "
        "that is trained on it; 0: synchronous training",
        "[0, inf)",
    )
    durability: str = option(
        "fsync",
        "failures that do not destroy stored data; fsync: a killed process or a power loss; os: a killed process only",
        choices=("fsync", "os"),
    )
    lease_s: float = option(
        30.0,
        "an actor or scorer that sends no request for this many seconds loses its work to other processes",
        "(0, inf)",
    )
    max_attempts: int = option(
        3,
        "after this many failed attempts at an episode, its whole group is dropped, unless the drop would throw away "
        "more episodes than further attempts take. This many failed scorings of an episode count as one failed attempt "
        "(docs/replay.md#groups-of-which-a-member-fails)",
        "[1, inf)",
    )
    max_store_gb: float = option(
        64.0,
        "largest size of a shard's store, in GB; while the store is larger than 0.8 of this, no new episodes start",
        "(0, inf)",
    )
    max_dead_letters: int = option(
        10_000,
        "maximum number of dead letters (records of failures) that a shard keeps; the oldest are deleted first",
        "[1, inf)",
    )
    dead_letter_share: float = option(0.1, "share of replay.max_store_gb that dead letters may take", "(0, 0.5]")
    retention: str = option(
        "none",
        "trajectories that the store keeps; none: only those that may still be trained; window: also those that the "
        "last replay.retention_steps steps trained; all: every one",
        choices=("none", "window", "all"),
    )
    retention_steps: int = option(
        100, "with retention=window: number of last steps whose trajectories are kept", "[1, inf)"
    )
    reissue_evicted: bool = option(False, "if a group was thrown away because of its age, run its task again")
    oversample: float = option(
        1.0,
        "more than 1: start more episodes, to make up for groups that filters drop; 1.5 starts half a batch more",
        "[1, inf)",
    )
    spare_batches: float | None = option(
        0.5,
        "number of complete batches that may wait in addition to the next one; if more wait, fewer episodes start; "
        "null: start all episodes that replay.max_lag allows. It has no effect with replay.sampler.kind=freshest or "
        "prioritised, or with replay.sampler.max_times_sampled above 1",
        "[0, inf)",
    )
    old_groups: OldGroupsConfig = field(default_factory=OldGroupsConfig)
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
    def can_wait(self) -> bool:
        """True if a step may wait for groups that would become too old. The sampler must then train these groups before
        all others."""
        return self.max_lag > 0 and self.sampler.max_times_sampled == 1 and self.sampler.kind == "oldest"

    @property
    def can_mask(self) -> bool:
        """True if tokens that are too old may be masked. With `max_lag=0` there are no such tokens. Groups that are
        trained several times grow old on purpose."""
        return self.max_lag > 0 and self.sampler.max_times_sampled == 1

    @property
    def can_pace(self) -> bool:
        """True if each complete group is trained once and in order, so that waiting groups count as coming batches."""
        return self.sampler.max_times_sampled == 1 and self.sampler.kind in ("oldest", "fifo")
