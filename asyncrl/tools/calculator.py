"""The tool `calculator`. A call is one operation on two numbers, so a longer expression takes several turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any, ClassVar

from asyncrl.tools.base import Tool, ToolRefusal

DECIMALS = 6
_MAX_DIGITS = 40
_NUMBER = r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))"
_EXPRESSION = re.compile(rf"\s*{_NUMBER}\s*([-+*/])\s*{_NUMBER}\s*")
_WHOLE: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
_OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {"+": add, "-": sub, "*": mul, "/": truediv}


class Calculator(Tool):
    """Works out one operation on two numbers."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "calculator",
        "description": "Does one operation (+, -, * or /) on two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "two numbers and an operator, as in 5*3"}},
            "required": ["expression"],
        },
    }

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """The result, rounded to DECIMALS decimals, without trailing zeros.

    Raises ToolRefusal: the expression is not one operation on two numbers, or divides by zero.
    """
    parts = _EXPRESSION.fullmatch(expression)
    if parts is None:
        raise ToolRefusal("Error: write two numbers with one of + - * / between them, such as 5*3.")
    if any(len(part) > _MAX_DIGITS for part in parts.groups()):
        raise ToolRefusal(f"Error: a number may have at most {_MAX_DIGITS} digits.")
    left, operator, right = parts.groups()
    if operator != "/" and "." not in left and "." not in right:
        # Whole numbers, which most calls have, need no fractions.
        return str(_WHOLE[operator](int(left), int(right)))
    try:
        return _text(_OPERATIONS[operator](Fraction(left), Fraction(right)))
    except ZeroDivisionError:
        raise ToolRefusal("Error: division by zero.") from None


def _text(value: Fraction) -> str:
    scaled = round(value * 10**DECIMALS)
    whole, decimals = divmod(abs(scaled), 10**DECIMALS)
    text = f"{whole}.{decimals:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text
