"""The input of a simulation: the rates of the parts of a run, and the sizes that its configuration sets.

Both come from a run, or from a YAML file that a user wrote or edited.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncrl.config.checks.replay import old_groups_conflicts
from asyncrl.config.keys import OPTIONS
from asyncrl.config.refusals import refusal_of
from asyncrl.config.schema import OldGroupsConfig, ReplayConfig, SamplerConfig
from asyncrl.errors import ConfigError
from asyncrl.replay.from_config import masks_old, wait_s
from asyncrl.replay.starts.admission import Admission

TREATMENT_NAMES = ("evict", "wait", "mask", "both")
"""The treatments of groups that become too old: they are thrown away, waited for, trained without their old tokens, or
first waited for and then trained without their old tokens."""
SHORTEST_S = 1e-9
"""The shortest time in which an engine can decode a token. With much shorter times the sums of a simulation round to
0."""
Count = Annotated[int, Meta(ge=1, le=10**12)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]


class TypicalEpisode(Struct, frozen=True, forbid_unknown_fields=True):
    """The lengths and times of one episode.

    - `sampled`: the number of sampled tokens
    - `tokens`: the number of all tokens
    - `turns`: the number of the policy's turns
    - `tools_s`: the seconds that its tools take
    """

    sampled: Count
    tokens: Count
    turns: Count = 1
    tools_s: Seconds = 0.0


class Rates(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured speed of each part of a run.

    - `tasks` is a sample of the tasks: each entry is the list of the episodes of one task. A simulated group gets one
      task, and each member of the group one episode of this task.
    - An engine that decodes n requests at once takes `pass_s + n * request_s` seconds for one token of each request.
    - New weights reach an engine `transfer_s` after they are published. The engine then pauses for `switch_s`.
    - A scorer takes `label_s` per trajectory.
    - A learner step takes `token_s` for each token of the batch, divided by the number of the learner's GPUs. It takes
      another `step_s`, which does not depend on that number. A step that publishes takes
      `publish_s` more.
    - `failed` is the share of episodes that fail, and `zero_variance` the share of groups whose rewards are all equal.
    - `requests` has the smallest and the largest number of requests with which the speed of an engine was measured;
      empty: unknown.
    - `steps` is the number of measured learner steps; 0: unknown.
    """

    tasks: Annotated[list[Annotated[list[TypicalEpisode], Meta(min_length=1)]], Meta(min_length=1)]
    pass_s: Seconds
    request_s: Seconds
    token_s: Seconds
    step_s: Seconds = 0.0
    publish_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    switch_s: Seconds = 0.0
    label_s: Seconds = 0.0
    failed: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    zero_variance: Share = 0.0
    requests: list[float] = []
    steps: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.pass_s + self.request_s < SHORTEST_S:
            raise ValueError(
                f"pass_s and request_s together are less than {SHORTEST_S:g}: an engine would take no time"
            )


class Sizes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes of a run.

    - `engines`: the number of engines; `engine_gpus`: the number of GPUs of each engine
    - `concurrency`: the maximum number of episodes that an engine runs at once
    - `learner_gpus`: the number of GPUs of the learner; `scorers`: the number of scorers
    - `wait_s`, `masks_old`: the options `wait_s` and `mask` of replay.old_groups
    - All other fields are the options of the same names in docs/configuration.md.
    """

    engines: Count
    learner_gpus: Count = 1
    scorers: Count = 1
    engine_gpus: Count = 1
    concurrency: Count = 64
    batch_size: Count = 64
    group_size: Count = 8
    publish_every: Count = 1
    max_lag: Annotated[int, Meta(ge=0)] = 2
    max_times_sampled: Count = 1
    oversample: Annotated[float, Meta(ge=1, le=1e6)] = 1.0
    sampler: str = "oldest"
    spare_batches: Annotated[float, Meta(ge=0)] | None = 0.5
    wait_s: Seconds | None = None
    masks_old: bool | None = None
    filter_zero_variance: bool = False

    def __post_init__(self) -> None:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}")
        if self.sampler not in (known := OPTIONS["replay.sampler.kind"].choices):
            raise ValueError(f"sampler {self.sampler!r} must be one of {', '.join(known)}")
        for conflict in old_groups_conflicts(self.replay):
            raise ValueError(refusal_of(conflict, self))

    @property
    def replay(self) -> ReplayConfig:
        """The configuration of a replay of these sizes."""
        return ReplayConfig(
            max_lag=self.max_lag,
            oversample=self.oversample,
            spare_batches=self.spare_batches,
            sampler=SamplerConfig(self.sampler, max_times_sampled=self.max_times_sampled),
            old_groups=OldGroupsConfig(self.wait_s, self.masks_old),
        )

    @property
    def admission(self) -> Admission:
        """The admission of a replay of these sizes."""
        return Admission(self.max_lag, self.batch_size * self.publish_every, self.max_times_sampled, self.oversample)

    @property
    def admitted(self) -> float:
        """The number of episodes that the age bound lets run at once."""
        return self.admission.capacity(0) / self.max_times_sampled

    @property
    def treatment(self) -> str:
        """The name of the treatment of groups that become too old, one of TREATMENT_NAMES."""
        waits = wait_s(self.replay) != 0
        return {(0, 0): "evict", (1, 0): "wait", (0, 1): "mask", (1, 1): "both"}[waits, masks_old(self.replay)]

    def treated(self, treatment: str, max_lag: int | None = None) -> Self:
        """The sizes with another treatment of groups that become too old, and with another `max_lag` if it is given. A
        wait that was 0 gets the default limit. Raises ValueError: `asyncrl train` would refuse the combination."""
        lag = self.max_lag if max_lag is None else max_lag
        waits, masks = treatment in ("wait", "both"), treatment in ("mask", "both")
        found = replace(self, max_lag=lag, wait_s=(self.wait_s or None) if waits else 0.0, masks_old=masks)
        # If no wait is possible, null means no wait, and would be accepted. A number is refused, as `asyncrl train`
        # refuses it.
        return found if found.treatment == treatment else replace(found, wait_s=1.0)

    @property
    def gpus(self) -> int:
        """The number of GPUs of engines and learner together."""
        return self.engines * self.engine_gpus + self.learner_gpus


class RunDescription(Struct, frozen=True, forbid_unknown_fields=True):
    """A run, as the simulation models it."""

    rates: Rates
    sizes: Sizes


def read_description(path: Path) -> RunDescription:
    """Read the description in a YAML file. Raises ConfigError: it cannot be read, or a value is missing or wrong."""
    try:
        # Types are not checked strictly, since YAML reads 1e-5, which has no decimal point, as a text.
        return msgspec.yaml.decode(path.read_bytes(), type=RunDescription, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}; `asyncrl plan RUN --save FILE` writes such a file") from error


def write_description(description: RunDescription, path: Path) -> None:
    path.write_bytes(msgspec.yaml.encode(description))
