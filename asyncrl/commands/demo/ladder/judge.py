"""A process reward model without a neural network. A chosen share of its judgements is wrong.

It works the expression out:

- A calculation is right if the remaining expression has the value of the task's expression.
- An undo is right if there was a wrong step to undo.
- A step with several calls is right if all of them are.
- An answer is right if it is the value of the task's expression.

`accuracy` is the share of judgements that are right. A step's judgement depends only on the episode up to the step, so
that a policy can learn to exploit wrong judgements, as it can with a trained model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import MalformedCall, parse_turn
from asyncrl.commands.demo.ladder.expressions import Nested
from asyncrl.commands.demo.ladder.tools import LadderCalculator, Undo
from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.transcript import Transcript
from asyncrl.types import ToolCall

SURE = 0.95
"""The score of a step that is judged right. A step that is judged wrong has 1 - SURE."""

_TASK = re.compile(r"<\|im_start\|>user\n([-0-9+*()]+)<\|im_end\|>")
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_EXPRESSION = re.compile(r"[-0-9+*()]+")
_FUNCTIONS = {tool.schema["name"]: tool.schema for tool in (LadderCalculator, Undo)}


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
        if not (type(accuracy) in (int, float) and 0 <= accuracy <= 1):
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
    text, value = "", 0
    states: list[str] = []
    for index, passage in enumerate(transcript):
        if not text:
            states, value = _opening(passage.text)
        text += passage.text
        if passage.is_step:
            following = next((each.text for each in transcript[index + 1 : index + 2] if not each.is_step), None)
            yield _Step(text, _is_right(passage.plain, following, states, value))


def _opening(text: str) -> tuple[list[str], int]:
    """The expressions up to the policy's first turn, the oldest first, and the value of the task's expression."""
    if (task := _TASK.search(text)) is None:
        raise ScoringError("the prompt has no expression of the ladder")
    return [task[1], *filter(None, _results(text))], Nested(task[1]).value()


def _results(text: str) -> list[str]:
    """The results of calls; empty texts for errors."""
    return [each if _EXPRESSION.fullmatch(each) else "" for each in _RESULT.findall(text)]


def _is_right(step: str, following: str | None, states: list[str], value: int) -> bool:
    """True if all calls of a step are right, or its answer. Add the expressions that the calls make to `states`.

    `following` has the results of the calls. It is None if no results follow, as at the end of an episode.
    """
    calls = parse_turn(step, _FUNCTIONS, FORMATS["hermes"]).calls
    if not calls:
        return step.strip() == str(value)
    results = None if following is None else iter(_results(following))
    is_right = True
    for call in calls:
        made = _foreseen(call, states) if results is None else next(results, "")
        if not made:
            is_right = False
        elif call.name == "undo":
            is_right &= Nested(states[-1]).value() != value
            states[-2:] = [made]
        else:
            is_right &= Nested(made).value() == value
            states.append(made)
    return is_right


def _foreseen(call: ToolCall | MalformedCall, states: Sequence[str]) -> str:
    """The expression that a call makes; empty if the call is refused."""
    if isinstance(call, MalformedCall):
        return ""
    if call.name == "undo":
        return states[-2] if len(states) > 1 else ""
    state, operator = Nested(states[-1]), call.arguments["operator"]
    return state.reduced(operator).text if operator in state.workplace.operators else ""
