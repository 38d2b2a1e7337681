"""Saves the finished steps when the learner is asked to stop, before the process ends.

In these cases finished steps are not saved, and the restarted learner trains them again:

- The stop comes between the first update and the end of a step with several updates. The weights then belong to no
  finished step.
- No version was published after the last finished step. If the step were saved, the restarted learner would serve its
  weights under the number of the newest version, which has other weights.
- The models are not on the GPUs, since servers that share the GPUs have not freed them in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import StoppedError
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.colocation import SharedGpus
from asyncrl.learner.ranks.ranks import Ranks


class SavesSteps(Protocol):
    """Saves the steps in `progress`; `saved` is the number of steps in the newest checkpoint."""

    checkpoints: Checkpoints
    progress: Progress
    saved: int

    def save(self) -> None:
        """Begin a checkpoint."""

    def save_prepared(self) -> None:
        """Begin a checkpoint of the models as `checkpoints.prepare` found them. The main thread may be in a pass."""


@dataclass(eq=False)
class StopCheckpoint:
    """Saves the finished steps of a run that is stopped. `report` logs the last finished step, if it is not logged
    yet."""

    ranks: Ranks
    gpus: SharedGpus
    checkpointing: SavesSteps
    report: Callable[[], None]
    publish_every: int
    weights_are_whole: bool = True
    """False while the weights may belong to no finished step."""

    @contextmanager
    def saving_finished_steps(self) -> Iterator[None]:
        """Save the finished steps if a stop ends the block, and raise the block's StoppedError again.

        If a rank's main thread stays in the middle of a pass, the helper thread saves the steps, and ends the process.
        """
        self.ranks.stopping.save = self._save_within_pass
        try:
            yield
        except StoppedError:
            # A rank in the middle of a pass can save only with `_save_within_pass`, and all ranks must save in the same
            # way.
            if self.ranks.stopping.is_abrupt:
                self._save_within_pass()
            else:
                self._save_with(self._save)
            raise

    def save_finished_steps(self) -> None:
        """Begin a checkpoint of the finished steps, unless they are saved already, or cannot be saved for one of the
        reasons at the top of this file. The GPUs must belong to the learner."""
        self._save_with(self.checkpointing.save)

    def _save_with(self, save: Callable[[], object]) -> None:
        checkpointing = self.checkpointing
        steps = checkpointing.progress.step
        if self.weights_are_whole and steps % self.publish_every == 0 and steps > checkpointing.saved:
            with self.ranks.activity.finishing("a checkpoint of the finished steps"):
                save()

    def _save(self) -> None:
        if self.gpus.acquire_although_stopped():
            self.checkpointing.save()

    def _save_within_pass(self) -> None:
        if self.gpus.has_gpus:
            self._save_with(self.checkpointing.save_prepared)
        self.checkpointing.checkpoints.close()
        self.report()
