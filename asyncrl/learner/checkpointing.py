"""Checkpointing: begins a checkpoint when one is due, and tells the replay once it is complete.

Until then, the replay keeps the data of the steps that a restart would train again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.settings import SettingsHistory
from asyncrl.learner.stop_request import StopRequest
from asyncrl.learner.trainer import Trainer


def resume(
    checkpoints: Checkpoints, trainer: Trainer, history: SettingsHistory, demonstrations: DemonstrationFeed | None
) -> Progress:
    """Restore the models, the state of the algorithm and the position in the demonstrations from the newest checkpoint,
    if there is one. Raises CheckpointError: the checkpoint cannot be used."""
    progress = checkpoints.restore(trainer.models) or Progress()
    # The saved state fits only the algorithm that trained the last step. A later step may use another one.
    trainer.configure(history.at(max(0, progress.step - 1)))
    if progress.algorithm:
        trainer.algorithm.restore(progress.algorithm)
    progress.restore_models(trainer.models)
    if demonstrations is not None:
        demonstrations.resume(progress)
    return progress


@dataclass(eq=False)
class Checkpointing:
    """Saves `progress` and the models of `trainer` after every `every` steps and after the last of `total_steps`."""

    checkpoints: Checkpoints
    ranks: Ranks
    trainer: Trainer
    progress: Progress
    replay: BatchSource
    stop: StopRequest
    every: int
    total_steps: int
    saved: int = field(init=False)
    """The number of steps in the newest checkpoint. Its files might not be complete yet."""

    def __post_init__(self) -> None:
        self.saved = self.progress.step

    def report_restored(self) -> None:
        """Tell the replay of the checkpoint that this process resumed from."""
        # An earlier process may have ended after it wrote the checkpoint and before it told the replay.
        if self.progress.step:
            self.stop.together(self._report, self.progress.step)

    def end_step(self, steps: int) -> None:
        """Begin a checkpoint after `steps` steps if one is due. If none is due, report a checkpoint that has become
        complete."""
        if steps % self.every == 0 or steps == self.total_steps:
            self.finish()
            self.save()
        else:
            self.stop.together(self._report_completed)

    def finish(self) -> None:
        """Wait until the newest checkpoint is complete, and report it."""
        self.checkpoints.wait()
        self.stop.together(self._report_completed)

    def save(self) -> None:
        """Begin a checkpoint. It is reported to the replay at the end of the step in which it becomes complete."""
        # Holds the lock, so that the helper thread, which saves when a process is stopped, cannot start a second
        # checkpoint before this one is recorded.
        with self.ranks.stopping.lock:
            self.checkpoints.save(self._whole_progress(), self.trainer.models)
            self.saved = self.progress.step

    def save_prepared(self) -> None:
        """Begin a checkpoint of the tensors that the last `checkpoints.prepare` found. A helper thread may call this
        during a forward or backward pass, as long as no weight has changed since `prepare`."""
        self.checkpoints.save_prepared(self._whole_progress())

    def _whole_progress(self) -> Progress:
        self.progress.keep_models(self.trainer.models)
        return self.progress

    def _report_completed(self) -> None:
        if steps := self.checkpoints.completed():
            self._report(steps)

    def _report(self, steps: int) -> None:
        if self.ranks.rank == 0:
            self.replay.checkpointed(steps, self.checkpoints.covered())
