"""A process reward model without a neural network. A chosen share of its judgements is wrong.

It works the expression out. A calculation is right if the remaining expression has the value of the task's expression.
An undo is right if there was a wrong step to undo. An answer is right if it is the value of the task's expression.

`accuracy` is the share of judgements that are right. A step's judgement depends only on the episode up to the step, so
that a policy can learn to exploit wrong judgements, as it can with a trained model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.commands.demo.ladder.expressions import Nested
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.transcript import Transcript

SURE = 0.95
"""The score of a step that is judged right. A step that is judged wrong has 1 - SURE."""

_TASK = re.compile(r"<\|im_start\|>user\n([-0-9+*()]+)<\|im_end\|>")
_RESULT = re.compile(r"<tool_response>\n([-0-9+*()]+)\n</tool_response>")
_UNDO = '"name": "undo"'


@dataclass(frozen=True, slots=True)
class _Step:
    """A step: the text of the episode up to the end of the step, and whether the step is right."""

    before: str
    is_right: bool


class StepJudge:
    """Scores steps. Set `scoring.prm.family=asyncrl.commands.demo.ladder.StepJudge`, and for example
    `scoring.prm.params={accuracy: 0.8, seed: 0}`.
    """

    def __init__(self, config: ScoringModelConfig) -> None:
        params = dict(config.params)
        accuracy, seed = params.pop("accuracy", 1.0), params.pop("seed", 0)
        if params:
            raise ConfigError(f"scoring.prm.params has {', '.join(sorted(params))}; it may have accuracy and seed")
        if not (isinstance(accuracy, int | float) and 0 <= accuracy <= 1):
            raise ConfigError(f"scoring.prm.params.accuracy={accuracy!r} must be a number in [0, 1]")
        self._accuracy, self._seed = float(accuracy), seed
        self.name = f"judge@{self._accuracy}"

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        """Score the steps of each transcript. Raises ScoringError: a transcript is not of a ladder task."""
        return [StepScores.of_probabilities([self._probability(step) for step in _steps(each)]) for each in transcripts]

    def _probability(self, step: _Step) -> float:
        digest = hashlib.sha256(f"{self._seed} {step.before}".encode()).digest()
        is_mistaken = int.from_bytes(digest[:8], "big") / 2**64 >= self._accuracy
        return SURE if step.is_right != is_mistaken else 1 - SURE


def _steps(transcript: Transcript) -> Iterator[_Step]:
    text, current, value = "", "", 0
    for index, passage in enumerate(transcript):
        if passage.is_step:
            following = transcript[index + 1].text if index + 1 < len(transcript) else ""
            result = found[1] if (found := _RESULT.search(following)) else ""
            is_right = _is_right(passage.plain, current, result, value)
            current = result or current
            text += passage.text
            yield _Step(text, is_right)
        else:
            if not text:
                current, value = _opening(passage.text)
            text += passage.text


def _opening(text: str) -> tuple[str, int]:
    """The expression at the policy's first turn, and the value of the task's expression."""
    if (task := _TASK.search(text)) is None:
        raise ScoringError("the prompt has no expression of the ladder")
    return (_RESULT.findall(text) or [task[1]])[-1], Nested(task[1]).value()


def _is_right(step: str, current: str, result: str, value: int) -> bool:
    if _UNDO in step:
        return bool(result) and Nested(current).value() != value
    if "<tool_call>" in step:
        return bool(result) and Nested(result).value() == value
    return step.strip() == str(value)
