"""The settings of a learner: some for the whole run, and some for each step, which may change when the run resumes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.changes import ConfigChange
from asyncrl.config.schema import AlgorithmConfig, CriticConfig, ImplicitConfig, LearnerConfig, ModelConfig
from asyncrl.data.rendered import RenderedDemonstrations
from asyncrl.learner.batch.settings import BatchSettings, KeepSettings
from asyncrl.learner.model.canary import CanarySettings
from asyncrl.learner.profiling import ProfileSettings


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings that one step is trained with: the sections `learner` and `algorithm`, the learning rates of the
    other models, the weight of a shared critic's loss, and the number of first steps that train only the critic."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    critic_lr: float
    critic_weight: float
    critic_warmup_steps: int
    implicit_lr: float

    @property
    def batch(self) -> BatchSettings:
        """The settings that the batch of the step is built with."""
        return BatchSettings.of(self.learner, self.algorithm)


class SettingsHistory:
    """The settings of every step of a run. `starts` has settings by the first step that they hold for, from step 0 on.
    `changes` are the recorded changes of the configuration."""

    def __init__(self, starts: Mapping[int, StepSettings], changes: Sequence[ConfigChange] = ()) -> None:
        self.starts = dict(sorted(starts.items()))
        self._first = list(self.starts)
        self._changes = changes

    def at(self, step: int) -> StepSettings:
        """Return the settings of a step."""
        return self.starts[self._first[bisect_right(self._first, step) - 1]]

    def every(self) -> list[StepSettings]:
        """Return all settings with which some step is trained."""
        return list(self.starts.values())

    def changes_at(self, step: int) -> list[ConfigChange]:
        """Return the recorded changes that hold from `step` on."""
        return [each for each in self._changes if each.step == step]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of the models: the sections that name them, the seed of new adapters, the policy's temperature, and
    the tokens of the longest episode and of the longest sequence of any kind."""

    policy: ModelConfig
    critic: CriticConfig
    implicit: ImplicitConfig
    seed: int
    temperature: float
    longest_episode: int
    longest: int


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a whole run.

    - `folder` is the folder of the run. `gpu_locks` is the folder of the locks on GPUs that servers share. If it is
      None, servers share no GPUs.
    - `largest_episode` tokens must fit into one pass: a pass has all branches of an episode.
    - Weights are published in buckets of `bucket_bytes`, with a canary if `canary` has its settings.
    - Each step also trains `demonstrations`, if there are any.
    - Lags are counted up to `max_lag`. With `uploads_model` the sinks of metrics get the exported model.
    """

    folder: Path
    learner: LearnerConfig
    models: ModelSettings
    algorithm: AlgorithmConfig
    seed: int
    max_lag: int
    bucket_bytes: int
    largest_episode: int
    canary: CanarySettings | None
    keep: KeepSettings
    profile: ProfileSettings
    gpu_locks: Path | None = None
    demonstrations: RenderedDemonstrations | None = field(default=None, repr=False)
    uploads_model: bool = False
