"""Saves and loads checkpoints of the workers' models, in the format of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.state import Models
from asyncrl.learner.ranks.ranks import Ranks

KEPT = 1 << 30
"""The number of checkpoints that a folder keeps: all of them, since the program decides when it saves."""


def save(folder: str, ranks: Ranks, models: Models, step: int, algorithm: Mapping[str, float]) -> None:
    """Write the models of step `step`, and return once the checkpoint is complete. Raises OSError: the write fails."""
    progress = Progress(step=step, algorithm=dict(algorithm))
    progress.keep_models(models)
    with closing(Checkpoints(Path(folder), KEPT, ranks)) as checkpoints:
        checkpoints.save(progress, models)
        checkpoints.wait()


def restored(folder: str, ranks: Ranks, models: Models) -> Progress | None:
    """Load the newest checkpoint into the models, and return its progress; None if there is no checkpoint.

    Raises CheckpointError: the checkpoint is of another model, or all checkpoints are damaged.
    """
    progress = Checkpoints(Path(folder), KEPT, ranks).restore(models)
    if progress is not None:
        progress.restore_models(models)
    return progress
