"""The settings of a learner: some for the whole run, and some for each step. The settings of later steps may change
when the run resumes."""

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
    """The settings that one step is trained with.

    - `learner` and `algorithm`: these sections of the configuration.
    - `critic_lr` and `implicit_lr`: the learning rates of the critic and of the implicit process model, which rewards
      single tokens.
    - `critic_weight`: the weight of the critic's loss, if the critic shares the policy's layers.
    - `critic_warmup_steps`: the number of first steps that train only the critic.
    """

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
    """The settings of every step of a run. `starts` maps a step to the settings that hold from that step on, and begins
    with step 0. `changes` are the recorded changes of the configuration."""

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
    """The settings of the models.

    - `policy`, `critic` and `implicit`: the sections of the configuration that name the models.
    - `seed`: the seed of the values with which new LoRA adapters begin.
    - `temperature`: the policy's temperature.
    - `longest_episode`: the maximum number of tokens in one sequence of an episode.
    - `longest`: the maximum number of tokens in any sequence, including demonstrations.
    """

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

    - `folder`: the folder of the run.
    - `gpu_locks`: the folder of the locks of the GPUs that the learner shares with servers. None: it shares none.
    - `largest_episode`: the maximum number of tokens in one episode. If it consists of several sequences, all of them
      must fit into one pass.
    - `bucket_bytes`: the size of the buckets in which weights are published.
    - `canary`: the settings of the canary of each version (log-probs with which engines check its weights). None: no
      canaries.
    - `demonstrations`: the demonstrations that are trained in addition to episodes, if there are any.
    - `max_lag`: the metrics count each lag up to this number separately, and all greater lags together.
    - `uploads_model`: true if the sinks of metrics also get the exported model.
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
