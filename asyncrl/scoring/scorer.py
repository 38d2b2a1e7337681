"""Episodes to labels: each is judged by rule, its steps by the process model, and the scores are shaped.

Every episode ends in labels or in the reason why there are none. One that cannot be scored does not touch the others:
where a batch fails in the process model, its members are scored one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import AsyncrlError, ScoringError
from asyncrl.scoring.models.base import ProcessRewardModel
from asyncrl.scoring.shaping import shape
from asyncrl.scoring.transcript import Decoder, answer_text, transcript
from asyncrl.scoring.verifier import Verifier
from asyncrl.types import Labels, Task, Trajectory

logger = logging.getLogger(__name__)

Episode = tuple[Task, Trajectory]
Scores = NDArray[np.float32]
T = TypeVar("T")


class Scorer:
    """Labels episodes with the rules of `verifier` and, where there is one, the process model `prm`."""

    def __init__(
        self, config: ScoringConfig, tokenizer: Decoder, verifier: Verifier, prm: ProcessRewardModel | None = None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._verifier = verifier
        self._prm = prm

    def score(self, episodes: Sequence[Episode]) -> Iterator[Labels | ScoringError]:
        """The labels of each episode, in order, as they become ready; or why it has none."""
        step_scores = self._score_steps([trajectory for _, trajectory in episodes])
        for (task, trajectory), scores in zip(episodes, step_scores, strict=True):
            if isinstance(scores, ScoringError):
                yield scores
            else:
                yield _attempt(lambda t=task, e=trajectory, s=scores: self._label(t, e, s))  # type: ignore[misc]

    def _label(self, task: Task, trajectory: Trajectory, scores: Scores) -> Labels:
        verdict = self._verifier.verify(task, answer_text(trajectory, self._tokenizer), trajectory)
        shaped = shape(verdict.outcome, scores, trajectory.rewards, self._config.shaping)
        rule = self._config.rules.get(task.data_source, self._config.rule)
        return Labels(
            trajectory_id=trajectory.id,
            reward=shaped.reward,
            outcome=verdict.outcome,
            scorer=f"{rule}+{self._prm.name}" if self._prm else rule,
            step_scores=scores,
            step_ends=np.array([step.end for step in trajectory.steps[: len(scores)]], np.int32),
            extra={**shaped.parts, **{f"rule/{name}": value for name, value in verdict.extra.items()}},
        )
