"""A simulated user that tells the policy whether its number is right, and lets it try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.scoring.answers import after_thoughts
from asyncrl.scoring.rules.exact_number import MARK, final_number, true_number
from asyncrl.tools.interactions.base import Interaction, Response
from asyncrl.types import Task

TEXTS = {"right": "That is right.", "wrong": "That is wrong. Look for the mistake, and try again."}


class AnswerChecker(Interaction):
    """Scores each answer: 1 for a right answer, which ends the conversation, and 0 for a wrong answer.

    The number in an answer is found as the rule `exact_number` finds it. The task's `interaction_kwargs` must have
    `ground_truth`. `config` may have:

    - `tries`: the conversation ends after this number of wrong answers (default: null, no limit)
    - `strict`: true if the number must follow `####` (default: false)
    - `right`, `wrong`: the user's messages

    Raises ConfigError: `config` has another key.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if unknown := sorted(config.keys() - {"name", "tries", "strict", *TEXTS}):
            raise ConfigError(f"config has {', '.join(unknown)}; it may have tries, strict, right and wrong")
        self._tries = config.get("tries")
        if self._tries is not None and not (isinstance(self._tries, int) and self._tries > 0):
            raise ConfigError(f"config.tries is {self._tries!r}; it must be 1 or more, or null")
        self._strict = bool(config.get("strict", False))
        self._texts = {name: str(config.get(name, text)) for name, text in TEXTS.items()}
        self._truths: dict[str, Task] = {}
        self._tried: dict[str, int] = {}

    async def start_interaction(self, instance_id: str, ground_truth: Any = None, **kwargs: Any) -> None:
        """Begin a conversation. Raises ScoringError: the ground truth has no number."""
        task = Task(instance_id, [{"role": "user", "content": "?"}], ground_truth, "")
        true_number(task)
        self._truths[instance_id], self._tried[instance_id] = task, 0

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        self._tried[instance_id] += 1
        answer = after_thoughts(str(messages[-1]["content"]))
        has_form = not self._strict or MARK.search(answer)
        is_right = bool(has_form) and final_number(answer) == true_number(self._truths[instance_id])
        ends = is_right or self._tried[instance_id] == self._tries
        return ends, self._texts["right" if is_right else "wrong"], float(is_right), {}

    async def finalize_interaction(self, instance_id: str) -> None:
        self._truths.pop(instance_id, None)
        self._tried.pop(instance_id, None)
