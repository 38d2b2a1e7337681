"""Expressions with brackets, such as `(7-2-4)*3-8`, worked out one operation at a time.

The policy names an operator, and the calculator works out the leftmost operation with this operator in the first of the
innermost brackets. So each step is one decision, as in the demo, and a longer expression needs more decisions. Brackets
around a single number are removed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass

from asyncrl.commands.demo.arithmetic import Expression, parse

LARGEST_VALUE = 999
"""No intermediate result in a task is larger, so that long numbers do not add to the difficulty."""

_SMALLEST_OPERAND, _LARGEST_OPERAND = 2, 9
_MOST_BETWEEN = 4
_LEAST_INSIDE = 2
_OPERATOR_WEIGHTS = {"+": 2, "-": 2, "*": 2}
_BEFORE, _BEHIND = ("", *"(+-*"), ("", *")+-*")
"""Characters that may precede an opening bracket, and characters that may follow a closing bracket."""
_INNERMOST = re.compile(r"\(([^()]*)\)")


@dataclass(frozen=True, slots=True)
class Nested:
    """An expression, stored as text. Raises ValueError: the text is not an expression."""

    text: str

    def __post_init__(self) -> None:
        text = self.text
        while found := _INNERMOST.search(text):
            before, after = text[: found.start()], text[found.end() :]
            if parse(found[1]) is None or before[-1:] not in _BEFORE or after[:1] not in _BEHIND:
                raise ValueError(f"{self.text} is not an expression")
            text = f"{before}0{after}"
        if parse(text) is None:
            raise ValueError(f"{self.text} is not an expression")

    @property
    def workplace(self) -> Expression:
        """The part that the calculator works in: the first of the innermost brackets, else the whole expression."""
        found = _INNERMOST.search(self.text)
        expression = parse(found[1] if found else self.text)
        assert expression is not None
        return expression

    @property
    def is_number(self) -> bool:
        return not self.workplace.operators

    def reduced(self, operator: str) -> Nested:
        """Replace the leftmost operation in the workplace that has this operator by its result.

        Raises ValueError: the workplace does not contain `operator`.
        """
        rest = self.workplace.reduced(operator)
        found = _INNERMOST.search(self.text)
        if found is None:
            return Nested(str(rest))
        inner = f"({rest})" if rest.operators else str(rest)
        return Nested(self.text[: found.start()] + inner + self.text[found.end() :])

    def right_operator(self) -> str:
        """The operator that comes next by the rules of precedence."""
        operators = self.workplace.operators
        return "*" if "*" in operators else operators[0]

    def worked_out(self) -> list[Nested]:
        """The expression, and the expression after each right step. The last expression is a number."""
        steps, expression = [self], self
        while not expression.is_number:
            expression = expression.reduced(expression.right_operator())
            steps.append(expression)
        return steps

    def value(self) -> int:
        return int(self.worked_out()[-1].text)


def random_nested(rng: random.Random, operations: int) -> Nested:
    """Draw an expression with this number of operations. All numbers of its right steps are within LARGEST_VALUE."""
    while True:
        expression = Nested(_random_text(rng, operations))
        numbers = (number for step in expression.worked_out() for number in step.workplace.numbers)
        if all(abs(number) <= LARGEST_VALUE for number in numbers):
            return expression


def distinct_nested(
    count: int, rng: random.Random, operations: Collection[int], avoid: Collection[Nested] = ()
) -> list[Nested]:
    """Draw `count` different expressions that are not in `avoid`. `operations` has the allowed numbers of
    operations."""
    found: dict[Nested, None] = {}
    choices = sorted(operations)
    while len(found) < count:
        expression = random_nested(rng, rng.choice(choices))
        if expression not in avoid:
            found[expression] = None
    return list(found)


def _random_text(rng: random.Random, operations: int) -> str:
    """Draw parts with operators between them. A part is a number, or brackets with at least two operations, so that
    there is a choice within the brackets.
    """
    between = min(operations, rng.randint(2, _MOST_BETWEEN))
    inside = [0] * (between + 1)
    left = operations - between
    while left:
        taken = left if left <= _LEAST_INSIDE + 1 else rng.randint(_LEAST_INSIDE, left)
        inside[rng.randrange(len(inside))] += taken
        left -= taken
    if any(0 < count < _LEAST_INSIDE for count in inside):
        return _random_text(rng, operations)
    numbers = [str(rng.randint(_SMALLEST_OPERAND, _LARGEST_OPERAND)) for _ in inside]
    texts = [
        f"({_random_text(rng, count)})" if count else number for count, number in zip(inside, numbers, strict=True)
    ]
    operators = rng.choices(list(_OPERATOR_WEIGHTS), list(_OPERATOR_WEIGHTS.values()), k=between)
    return texts[0] + "".join(operator + text for operator, text in zip(operators, texts[1:], strict=True))
