"""The progress of a run: the counts and states of a checkpoint that are not tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.learner.checkpoint.state import Models
from asyncrl.types import BatchPlan


@dataclass(slots=True)
class Progress:
    """The progress of a run.

    - `step` counts finished steps; the other counts are totals over these steps.
    - `evaluations` maps the step of each pending evaluation to its version.
    - `algorithm` is the state that the algorithm keeps from step to step.
    - `norms` and `loss_scales` have the latest gradient norms and the loss scale of each model.
    - `demonstrations` counts the demonstrations trained so far.
    - `demonstrations_digest` is the digest of all demonstrations of the run.
    """

    step: int = 0
    trajectories: int = 0
    tokens: int = 0
    updates_skipped: int = 0
    updates_too_large: int = 0
    updates_empty: int = 0
    updates_overflowed: int = 0
    steps_skipped: int = 0
    evaluations: dict[int, int] = field(default_factory=dict)
    algorithm: dict[str, float] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    loss_scales: dict[str, list[float]] = field(default_factory=dict)
    demonstrations: int = 0
    demonstrations_digest: str = ""

    def add(self, plan: BatchPlan, skipped: int, too_large: int, empty: int, overflowed: int) -> None:
        """Count a finished step."""
        self.step += 1
        self.trajectories += len(plan.ids)
        self.tokens += sum(plan.tokens)
        self.count_updates(skipped, too_large, empty, overflowed)

    def count_updates(self, skipped: int, too_large: int, empty: int, overflowed: int) -> None:
        """Count the updates of a step that were left out."""
        self.updates_skipped += skipped
        self.updates_too_large += too_large
        self.updates_empty += empty
        self.updates_overflowed += overflowed

    def keep_models(self, models: Models) -> None:
        """Copy the models' gradient norms and loss scales into this progress."""
        self.norms = {name: list(model.norms) for name, model in models.items()}
        scales = {name: model.loss_scale for name, model in models.items()}
        self.loss_scales = {name: each.state() for name, each in scales.items() if each is not None}

    def restore_models(self, models: Models) -> None:
        """Restore the models' gradient norms and loss scales."""
        for name, model in models.items():
            model.norms.extend(self.norms.get(name, ()))
            if model.loss_scale is not None and name in self.loss_scales:
                model.loss_scale.restore(self.loss_scales[name])

    def skip(self) -> None:
        """Count a finished step that trained nothing."""
        self.step += 1
        self.steps_skipped += 1
