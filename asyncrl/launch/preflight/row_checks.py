"""The checks that read all rows of the data: episodes, demonstrations and lengths of prompts. They take long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ActorConfig
from asyncrl.launch.preflight.demonstrations import check_group_demonstrations
from asyncrl.launch.preflight.episode import EpisodeJudge, TrialStage, check_episodes
from asyncrl.launch.preflight.problems import Problems
from asyncrl.launch.preflight.prompts import check_prompts

if TYPE_CHECKING:
    from asyncrl.data.opening import RunTasks
    from asyncrl.data.reading import TaskFile


@dataclass(frozen=True, slots=True)
class RowChecks:
    """The checks of a run's rows, with all that they open.

    - `stage` and `open_judge`: for the episodes that are tried.
    - `measure`: the lengths of a file's prompts.
    - `prepare`: renders the demonstrations of `algorithm.sft.path`. None: there are none.
    """

    actor: ActorConfig
    tasks: RunTasks
    stage: TrialStage
    open_judge: Callable[[], EpisodeJudge]
    measure: Callable[[TaskFile], NDArray[np.int32]]
    prepare: Callable[[], object] | None

    def run(self, files: Sequence[TaskFile], found: Problems, stop: threading.Event | None) -> None:
        """Run the checks with the rows of `files`. Problems go to `found`."""
        with found.collected(), closing(self.open_judge()) as judge:
            check_episodes(self.actor, files, self.stage, judge)
        if self.prepare is not None:
            found.check(self.prepare)
        if self.actor.played_by:
            return
        with found.collected():
            for file in files:
                check_prompts(self.tasks.data, file, self.measure)
        found.check(partial(check_group_demonstrations, self.tasks, self.actor, self.stage.chat, files[:1], stop))
