"""Finds and reads the checkpoint that a command needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FinishedSteps:
    """A checkpoint: its folder, and the number of learner steps after which it was written."""

    folder: Path
    steps: int


BEST = "best"


def checkpoint_of(run: Path, learner: LearnerConfig, steps: int | str | None) -> FinishedSteps:
    """The checkpoint after `steps` learner steps. With BEST it is the checkpoint with the best evaluation. With None it
    is the newest checkpoint.

    Raises CheckpointError: the checkpoint does not exist (then the message lists those that do), or is damaged.
    """
    # These imports are here because torch takes seconds to load, and callers should refuse wrong arguments at once.
    from asyncrl.learner.checkpoint.checkpoint import Checkpoints, step_of
    from asyncrl.learner.ranks.ranks import Ranks

    checkpoints = Checkpoints(run / "checkpoints", learner.keep_checkpoints, Ranks.alone())
    kept = {step_of(folder): folder for folder in checkpoints.complete()}
    if not kept:
        every = learner.checkpoint_every
        raise CheckpointError(f"{run} has no checkpoint yet; the run writes one every {every} steps and one at its end")
    if steps == BEST:
        steps = next((step_of(folder) for folder in checkpoints.best()), BEST)
        if steps == BEST:
            raise CheckpointError(
                f"no checkpoint of {run} was evaluated: train with learner.keep_best=1, or name a step"
            )
    chosen = max(kept) if steps is None else int(steps)
    if chosen not in kept:
        raise CheckpointError(
            f"{run} has no checkpoint after {chosen} steps: use --step with one of {', '.join(map(str, kept))} "
            f"(the run keeps learner.keep_checkpoints={learner.keep_checkpoints})"
        )
    damage = checkpoints.damage(kept[chosen])
    if damage is not None:
        if not kept[chosen].exists():
            raise _replaced(kept[chosen])
        older = max((step for step in kept if step < chosen), default=None)
        advice = "the run has no older checkpoint" if older is None else f"the checkpoint before it is --step {older}"
        raise CheckpointError(f"{kept[chosen]} is damaged: {damage}; {advice}")
    return FinishedSteps(kept[chosen], chosen)


def read_checkpoint(checkpoint: FinishedSteps, read: Callable[[Path], None]) -> None:
    """Call `read` with a checkpoint's folder. Raises CheckpointError: the run has removed the checkpoint meanwhile."""
    try:
        read(checkpoint.folder)
    except (CheckpointError, OSError) as error:
        if checkpoint.folder.exists():
            raise
        raise _replaced(checkpoint.folder) from error


def _replaced(folder: Path) -> CheckpointError:
    return CheckpointError(f"the run has meanwhile replaced {folder} by a newer checkpoint: try again")
