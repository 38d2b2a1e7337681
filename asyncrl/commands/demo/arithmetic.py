"""The demo's task: expressions without brackets, such as `7+5*3-8`, worked out with a calculator in several calls.

In each call the policy names an operator, and the calculator works out the leftmost operation with that operator
(`tool.py`). So a turn needs one decision, and the rest of it is copied. All that the policy has to learn from the
reward is which operator comes next.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass

from asyncrl.ids import task_id
from asyncrl.types import Task

DATA_SOURCE = "asyncrl/arithmetic"
SYSTEM_PROMPT = "Work out the expression with the calculator, one operation a call."

_LARGEST_OPERAND = 9
_OPERATION_COUNTS = (2, 3, 4)
_OPERATOR_WEIGHTS = {"+": 2, "-": 1, "*": 3}
_MOST_PRODUCTS = 2
_EXPRESSION = re.compile(r"-?[0-9]+([+*-]-?[0-9]+)*")
_TERM = re.compile(r"(-?\d+)([+*-]?)")


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression: `operators[i]` is between `numbers[i]` and `numbers[i + 1]`. A number that is the result of an
    operation may be negative."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    def __str__(self) -> str:
        pairs = zip(self.numbers, (*self.operators, ""), strict=True)
        return "".join(f"{number}{operator}" for number, operator in pairs)

    def reduced(self, operator: str) -> Expression:
        """Replace the leftmost operation that has this operator by its result, even if precedence forbids that."""
        index = self.operators.index(operator)
        left, right = self.numbers[index : index + 2]
        result = left + right if operator == "+" else left - right if operator == "-" else left * right
        numbers = (*self.numbers[:index], result, *self.numbers[index + 2 :])
        return Expression(numbers, self.operators[:index] + self.operators[index + 1 :])

    def value(self) -> int:
        """The value: products first, then from left to right."""
        expression = self
        while expression.operators:
            expression = expression.reduced("*" if "*" in expression.operators else expression.operators[0])
        return expression.numbers[0]


def parse(text: str) -> Expression | None:
    """The expression in `text`; None if `text` is not an expression."""
    if not _EXPRESSION.fullmatch(text):
        return None
    terms = _TERM.findall(text)
    return Expression(tuple(int(number) for number, _ in terms), tuple(operator for _, operator in terms[:-1]))


def random_expression(rng: random.Random) -> Expression:
    symbols, weights = list(_OPERATOR_WEIGHTS), list(_OPERATOR_WEIGHTS.values())
    operators = rng.choices(symbols, weights, k=rng.choice(_OPERATION_COUNTS))
    while operators.count("*") > _MOST_PRODUCTS:
        operators = rng.choices(symbols, weights, k=len(operators))
    numbers = [rng.randint(1, _LARGEST_OPERAND) for _ in range(len(operators) + 1)]
    return Expression(tuple(numbers), tuple(operators))


def distinct_expressions(count: int, rng: random.Random, avoid: Collection[Expression] = ()) -> list[Expression]:
    """`count` different expressions, none of them in `avoid`."""
    found: dict[Expression, None] = {}
    while len(found) < count:
        expression = random_expression(rng)
        if expression not in avoid:
            found[expression] = None
    return list(found)


def opening(expression: Expression) -> list[dict[str, str]]:
    """The messages of a task before the policy's first turn."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": str(expression)}]


def arithmetic_task(expression: Expression, split: str, index: int) -> Task:
    truth = str(expression.value())
    return Task(
        id=task_id(DATA_SOURCE, split, index),
        messages=opening(expression),
        ground_truth=truth,
        data_source=DATA_SOURCE,
        extra_info={"split": split, "index": index, "interaction_kwargs": {"name": "checker", "ground_truth": truth}},
    )
