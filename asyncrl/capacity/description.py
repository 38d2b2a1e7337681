"""The input of a simulation: the rates of the parts of a run, and the sizes that its configuration sets.

Both come from a run, or from a YAML file that a person wrote or edited.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asyncrl.config.keys import OPTIONS
from asyncrl.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=10**12)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]


class TypicalEpisode(Struct, frozen=True, forbid_unknown_fields=True):
    """One episode: the tokens that its policy samples, all of its tokens, the policy's turns, and the seconds that it
    spends in tools."""

    sampled: Count
    tokens: Count
    turns: Count = 1
    tools_s: Seconds = 0.0


class Rates(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The speed of each part.

    - `tasks` has the episodes of some tasks; a simulated group draws one of the tasks, and its members draw episodes.
    - An engine that decodes n requests at once takes `pass_s + n * request_s` seconds for a token of each.
    - An engine pauses for `switch_s` when it takes new weights, `transfer_s` after they are published.
    - A scorer takes `label_s` for a trajectory.
    - A learner step takes `token_s` for each token of the batch, divided by the learner's GPUs, and `step_s`, which no
      further GPU makes shorter. A publish takes `publish_s` more.
    - `failed` is the share of episodes that fail, and `zero_variance` the share of groups whose rewards are all equal.
    - `requests` are the fewest and the most requests of an engine for which its speed was measured; empty: not known.
    - `steps` are the learner steps that were measured; 0: not known.
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
        if not self.pass_s + self.request_s:
            raise ValueError("pass_s and request_s are both 0: an engine would take no time")


class Sizes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes of a run. Without further words a field is the option of the same name in docs/configuration.md.

    `engines` of `engine_gpus` GPUs each run at most `concurrency` episodes each; the learner has `learner_gpus`.
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
    filter_zero_variance: bool = False

    def __post_init__(self) -> None:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of group_size {self.group_size}")
        if self.sampler not in (known := OPTIONS["replay.sampler.kind"].choices):
            raise ValueError(f"sampler {self.sampler!r} must be one of {', '.join(known)}")

    @property
    def gpus(self) -> int:
        """The GPUs of engines and learner together."""
        return self.engines * self.engine_gpus + self.learner_gpus


class RunDescription(Struct, frozen=True, forbid_unknown_fields=True):
    """A run, as the simulation sees it."""

    rates: Rates
    sizes: Sizes


def read_description(path: Path) -> RunDescription:
    """The description in a YAML file. Raises ConfigError: it cannot be read, or a value is missing or wrong."""
    try:
        # Not strict, since YAML takes 1e-5 for a text: its numbers have a point there.
        return msgspec.yaml.decode(path.read_bytes(), type=RunDescription, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}; `asyncrl plan RUN --save FILE` writes such a file") from error


def write_description(description: RunDescription, path: Path) -> None:
    path.write_bytes(msgspec.yaml.encode(description))
