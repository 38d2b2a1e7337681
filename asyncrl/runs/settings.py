"""The settings of a run that its views (status, dashboard, reports) show, or use to judge its health. `from_config`
makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import AlgorithmConfig, ModelConfig, ReplayConfig


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """A run's settings.

    - `steps`: the number of all planned learner steps;
    - `hang_s`: the seconds of silence after which a role counts as hung;
    - `servers`: the configured number of servers; None if it is not configured;
    - `per_gpu`: the number of servers on each GPU; None if a GPU cannot have several;
    - `keys`: the folder of CURVE keys (network.keys); None if the run has no keys;
    - `unread`: the scores that have no effect on the training, each with advice (see `config.unread`);
    - `can_mask`: true if the run may train on a group and leave out its tokens that are too old.
    """

    steps: int
    batch_size: int
    group_size: int
    learning_rate: float
    publish_every: int
    checkpoint_every: int
    concurrency: int
    is_colocated: bool
    hang_s: float
    engine: str
    servers: int | None
    per_gpu: int | None
    keys: str | None
    model: ModelConfig
    algorithm: AlgorithmConfig
    unread: Mapping[str, str]
    replay: ReplayConfig
    can_mask: bool
