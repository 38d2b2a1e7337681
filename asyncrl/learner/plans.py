"""The plans of the steps. All ranks get the same answer, since they must train each step and end together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from asyncrl.errors import TasksSolvedError
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.stop_request import StopRequest
from asyncrl.types import BatchPlan

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Plans:
    """Asks the replay for plans."""

    replay: BatchSource
    ranks: Ranks
    stop: StopRequest
    solved: str = field(default="", init=False)
    """The replay's message if it ended the run early, because the policy solves the tasks. Otherwise empty."""

    def of_step(self, step: int) -> BatchPlan | None:
        """Wait for the plan of a step. None: the policy solves the tasks. Raises StoppedError: a rank was asked to
        stop."""
        plan = self.stop.together(self._wait, step)
        # A rank may have asked before the replay ended the run. All ranks end if one is told to.
        if self.ranks.any(plan is None) or plan is None:
            self.solved = self.solved or "the policy solves the tasks"
            return None
        return plan

    def _wait(self, step: int) -> BatchPlan | None:
        try:
            while (plan := self.replay.plan(step)) is None:
                self.stop.check("stopped while waiting for a batch")
        except TasksSolvedError as error:
            self.solved = str(error)
            return None
        return plan

    def is_skipped(self, plan: BatchPlan) -> bool:
        """True if the step trains nothing. All ranks get the same answer, even if the plan was skipped after one rank
        had asked for it and before another rank did."""
        if plan.skipped:
            logger.warning("step %d trains nothing: %s", plan.step, plan.skipped)
        return self.ranks.any(bool(plan.skipped))
