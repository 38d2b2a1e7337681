"""The demo's task: flat expressions such as `17+5*3-8`, worked out with a calculator one operation at a time.

A worked line marks the next operation with brackets, `17+(5*3)-8`; the call computes what the brackets hold, and the next
line puts the result in their place. All of that is copying, except where the brackets go, which is what reward teaches.

The tasks have 2 to 4 operations, at most 2 of them products, in proportions for which every thoughtless order (leftmost,
rightmost, random) is right on 0.4 to 0.54 of them.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from asyncrl.types import Task

DATA_SOURCE = "asyncrl/arithmetic"
SYSTEM_PROMPT = "Work out the expression with the calculator, one operation a call."

_LARGEST_OPERAND = 9
_OPERATION_COUNTS = (2, 3, 4)
_OPERATOR_WEIGHTS = {"+": 2, "-": 1, "*": 3}
_MOST_PRODUCTS = 2


@dataclass(frozen=True, slots=True)
class Expression:
    """`numbers[i] operators[i] numbers[i + 1]` for every i; numbers may be negative once results stand among them."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    def __str__(self) -> str:
        return self._join([str(number) for number in self.numbers])

    def operation(self, index: int) -> str:
        """What a call computes for the operation at `index`."""
        return f"{self.numbers[index]}{self.operators[index]}{self.numbers[index + 1]}"

    def marked(self, index: int) -> str:
        """The expression with brackets around the operation at `index`."""
        texts = [str(number) for number in self.numbers]
        texts[index] = f"({texts[index]}"
        texts[index + 1] = f"{texts[index + 1]})"
        return self._join(texts)

    def result(self, index: int) -> int:
        left, right = self.numbers[index : index + 2]
        match self.operators[index]:
            case "+":
                return left + right
            case "-":
                return left - right
            case _:
                return left * right

    def replaced(self, index: int) -> Expression:
        """The expression with the operation at `index` replaced by its result, whether its turn had come or not."""
        numbers = (*self.numbers[:index], self.result(index), *self.numbers[index + 2 :])
        return Expression(numbers, self.operators[:index] + self.operators[index + 1 :])

    def allows(self, index: int) -> bool:
        """Whether working out the operation at `index` next keeps the value, whatever the numbers are."""
        if self.operators[index] == "*":
            return True
        after_plus = index == 0 or self.operators[index - 1] == "+"
        return after_plus and self.operators[index + 1 : index + 2] != ("*",)

    def value(self) -> int:
        expression = self
        while expression.operators:
            expression = expression.replaced(next(i for i in range(len(expression.operators)) if expression.allows(i)))
        return expression.numbers[0]

    def _join(self, texts: list[str]) -> str:
        return "".join(text + operator for text, operator in zip(texts, (*self.operators, ""), strict=True))


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
    return Task(
        id=f"{DATA_SOURCE}/{split}/{index}",
        messages=opening(expression),
        ground_truth=str(expression.value()),
        data_source=DATA_SOURCE,
        extra_info={"split": split, "index": index},
    )
