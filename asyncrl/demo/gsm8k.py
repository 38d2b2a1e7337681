"""Calculations out of GSM8K (Cobbe et al. 2021, arXiv:2110.14168, MIT), on which the step scorer is trained and judged.

Its solutions note every calculation as `<<12*2=24>>`. If a calculation uses an earlier result, the earlier expression
replaces the result where precedence allows: `<<12*2=24>>` and `<<12+24=36>>` become `12+12*2`. `gsm8k.txt` has the
calculations of the first 2,000 training problems, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asyncrl.demo.arithmetic import Expression, parse

EXCERPT = Path(__file__).with_name("gsm8k.txt")
OPERATIONS = range(2, 5)
"""As many as the demo's own expressions have."""

_LONGEST = 16
_NOTED = re.compile(r"<<([^=<>]*)=(-?\d+)>>")


def excerpt() -> list[Expression]:
    """The calculations in `gsm8k.txt`."""
    return [expression for line in EXCERPT.read_text().split() if (expression := parse(line))]


def calculations(answers: Iterable[str]) -> list[Expression]:
    """The different calculations of `OPERATIONS` whole-number steps in GSM8K's `answers`, in order."""
    found = [expression for answer in answers for expression in _noted(answer)]
    fitting = (each for each in found if len(each.operators) in OPERATIONS and len(str(each)) <= _LONGEST)
    return list(dict.fromkeys(fitting))


def _noted(answer: str) -> list[Expression]:
    by_result: dict[int, Expression] = {}
    for text, result in _NOTED.findall(answer):
        expression = parse(text.replace(" ", ""))
        if expression is not None and expression.value() == int(result):
            by_result[int(result)] = _unfolded(expression, by_result)
    return list(by_result.values())


def _unfolded(expression: Expression, by_result: dict[int, Expression]) -> Expression:
    """`expression` with earlier results written out, from the last to the first, wherever its value stays."""
    for index in reversed(range(len(expression.numbers))):
        earlier = by_result.get(expression.numbers[index])
        if earlier is None:
            continue
        longer = Expression(
            expression.numbers[:index] + earlier.numbers + expression.numbers[index + 1 :],
            expression.operators[:index] + earlier.operators + expression.operators[index:],
        )
        if longer.value() == expression.value():
            expression = longer
    return expression
