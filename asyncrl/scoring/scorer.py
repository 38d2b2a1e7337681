"""Episodes to labels: each is judged by rule, its steps by the process model, and the scores are shaped.

Every episode ends in labels or in the reason why there are none. One that cannot be scored does not touch the others:
where a batch fails in the process model, its members are scored one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

    def score(self, episodes: Sequence[tuple[Task, Trajectory]]) -> Iterator[Labels | ScoringError]:
        """The labels of each episode, in order, as they become ready; or why it has none."""
        step_scores = self._score_steps(episodes)
        for (task, trajectory), scores in zip(episodes, step_scores, strict=True):
            if isinstance(scores, ScoringError):
                yield scores
            else:
                yield _attempt(partial(self._label, task, trajectory, scores))

    def _score_steps(self, episodes: Sequence[tuple[Task, Trajectory]]) -> list[Scores | ScoringError]:
        together = _attempt(partial(self._read_steps, episodes))
        if not isinstance(together, ScoringError):
            return [*together]
        if len(episodes) == 1:
            return [together]
        return [self._score_steps([episode])[0] for episode in episodes]

    def _read_steps(self, episodes: Sequence[tuple[Task, Trajectory]]) -> list[Scores]:
        if self._prm is None:
            return [np.zeros(0, np.float32)] * len(episodes)
        read = self._prm.score([transcript(trajectory, self._tokenizer, task) for task, trajectory in episodes])
        scores = [each.probability for each in read]
        found, wanted = [each.shape for each in scores], [(len(trajectory.steps),) for _, trajectory in episodes]
        if found != wanted:
            raise ScoringError(f"{self._prm.name} gave scores of shapes {found} for steps of shapes {wanted}")
        return scores

    def _label(self, task: Task, trajectory: Trajectory, scores: Scores) -> Labels:
        verdict = self._verifier.verify(task, answer_text(trajectory, self._tokenizer), trajectory)
        shaped = shape(verdict.outcome, scores, trajectory.rewards, self._config.shaping)
        rule = self._config.rules.get(task.data_source, self._config.rule)
        ends = [step.end for step in trajectory.steps] if self._prm else []
        return Labels(
            trajectory_id=trajectory.id,
            reward=shaped.reward,
            outcome=verdict.outcome,
            scorer=f"{rule}+{self._prm.name}" if self._prm else rule,
            step_scores=scores,
            step_ends=np.array(ends, np.int32),
            extra={**shaped.parts, **{f"rule/{name}": value for name, value in verdict.extra.items()}},
        )


def _attempt(work: Callable[[], T]) -> T | ScoringError:
    try:
        return work()
    except AsyncrlError as error:
        return ScoringError(str(error))
    except Exception as error:
        logger.exception("scoring failed")
        return ScoringError(f"{type(error).__name__}: {error}")
