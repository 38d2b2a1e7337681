"""Worked transcripts of the demo's task: demonstrations for the policy, and judged steps for the step scorer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from asyncrl.demo.arithmetic import Expression, opening
from asyncrl.demo.tool import StepCalculator

TOOLS: list[Any] = [{"type": "function", "function": StepCalculator.schema}]

Message = dict[str, Any]

_LEANING = {"+": 1.75, "*": 1.4, "-": 1.0}
_CARELESS = 0.05
"""How often a step is careless: seldom, so that the order of operations is what the scorer learns."""


def call(operator: str, expression: str) -> Message:
    arguments: Mapping[str, str] = {"operator": operator, "expression": expression}
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(expression: Expression, rng: random.Random) -> list[Message]:
    """Well-formed calls and exact copying, but the operations in random order, as if any order were right.

    Sums come a little sooner than products, so that where operators are as frequent greedy decoding does not tip over
    into the right order by chance of the seed: its accuracy is 0.3 to 0.55 with any.
    """
    messages: list[Message] = [*opening(expression)]
    while expression.operators:
        (operator,) = rng.choices(expression.operators, [_LEANING[each] for each in expression.operators])
        messages.append(call(operator, str(expression)))
        expression = expression.reduced(operator)
        messages.append({"role": "tool", "content": str(expression)})
    return [*messages, {"role": "assistant", "content": str(expression)}]


def judged(expression: Expression, rng: random.Random) -> tuple[list[Message], list[bool]]:
    """A transcript with right and wrong steps, and which are right: those that copy exactly what is left and keep its
    value, and an answer when nothing is left to do."""
    messages: list[Message] = [*opening(expression)]
    right: list[bool] = []
    while expression.operators and (rng.random() > _CARELESS / 4):
        operator = rng.choice(expression.operators)
        copied = _miscopied(expression, rng) if rng.random() < _CARELESS else expression
        messages.append(call(operator, str(copied)))
        following = copied.reduced(operator)
        right.append(copied == expression and following.value() == expression.value())
        expression = following
        messages.append({"role": "tool", "content": str(expression)})
    answer = expression.numbers[0] + (rng.choice([-10, -1, 1, 10]) if rng.random() < _CARELESS else 0)
    right.append(not expression.operators and answer == expression.numbers[0])
    return [*messages, {"role": "assistant", "content": str(answer)}], right


def _miscopied(expression: Expression, rng: random.Random) -> Expression:
    numbers = list(expression.numbers)
    index = rng.randrange(len(numbers))
    numbers[index] += rng.choice([-10, -2, -1, 1, 2, 10])
    return Expression(tuple(numbers), expression.operators)
