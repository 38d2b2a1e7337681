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

from asyncrl.config.schema import ActorConfig, ScoringConfig
from asyncrl.launch.preflight.episodes.episode import ManagerTrial, check_episodes
from asyncrl.launch.preflight.problems import Problems
from asyncrl.launch.preflight.tasks.demonstrations import check_group_demonstrations
from asyncrl.launch.preflight.tasks.prompts import check_prompts, check_room
from asyncrl.launch.preflight.trial import TrialProcess

if TYPE_CHECKING:
    from asyncrl.chat.chat import Chat
    from asyncrl.data.opening import RunTasks
    from asyncrl.data.reading import TaskFile


@dataclass(frozen=True, slots=True)
class RowChecks:
    """The checks of a run's rows, with all that they open.

    - `open_chat`: the chat of the policy.
    - `open_managers`: the reward managers, which judge an episode that is tried.
    - `measure`: the lengths of a file's prompts.
    - `prepare`: renders the demonstrations of `algorithm.sft.path`. None: there are none.
    """

    actor: ActorConfig
    scoring: ScoringConfig
    tasks: RunTasks
    open_chat: Callable[[], Chat]
    open_managers: Callable[[], ManagerTrial]
    measure: Callable[[TaskFile], NDArray[np.int32]]
    prepare: Callable[[], object] | None

    def run(
        self, files: Sequence[TaskFile], trial: TrialProcess, found: Problems, stop: threading.Event | None
    ) -> None:
        """Run the checks with the rows of `files`. `trial` plays trial episodes. Problems go to `found`."""
        with found.collected(), closing(self.open_managers()) as managers:
            check_episodes(self.actor, self.scoring, files, trial, managers)
        if self.prepare is not None:
            found.check(self.prepare)
        if self.actor.played_by:
            return
        with found.collected():
            for file in files:
                check_prompts(self.tasks.data, file, self.measure)
                if self.tasks.data.max_prompt_length is None:
                    check_room(self.actor, self.open_chat(), file, stop)
        found.check(partial(check_group_demonstrations, self.tasks, self.actor, self.open_chat, files[:1], stop))
