"""The arithmetic of the tool `calculator`, and the single operations of a longer expression."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul, sub, truediv

DECIMALS = 6
LONGEST = 1000
"""The largest number of characters of an expression that `operations` reads."""

_MAX_DIGITS = 40
_NUMBER = r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))"
_EXPRESSION = re.compile(rf"\s*{_NUMBER}\s*([-+*/])\s*{_NUMBER}\s*")
_WHOLE: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
_OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {"+": add, "-": sub, "*": mul, "/": truediv}
_SIGNS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_ARITHMETIC = re.compile(r"[0-9.+*/() -]+")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on two numbers, such as `5*3`, and its result."""

    expression: str
    result: str


def calculate(expression: str) -> str:
    """The result of one operation on two numbers, rounded to DECIMALS decimals, without trailing zeros.

    Raises ValueError: the expression is not one operation on two numbers, or divides by zero.
    """
    parts = _EXPRESSION.fullmatch(expression)
    if parts is None:
        raise ValueError("write two numbers with one of + - * / between them, such as 5*3.")
    if any(len(part) > _MAX_DIGITS for part in parts.groups()):
        raise ValueError(f"a number may have at most {_MAX_DIGITS} digits.")
    left, operator, right = parts.groups()
    if operator != "/" and "." not in left and "." not in right:
        # Whole numbers, which most calls have, need no fractions.
        return str(_WHOLE[operator](int(left), int(right)))
    try:
        return _text(_OPERATIONS[operator](Fraction(left), Fraction(right)))
    except ZeroDivisionError:
        raise ValueError("division by zero.") from None


def operations(expression: str) -> tuple[list[Operation], str]:
    """The operations of a longer expression in the order in which they must be done, and the result of the last one.

    An operation contains the results of earlier operations, as `calculate` rounds them. If the expression is only a
    number, there are no operations, and the result is that number. Raises ValueError: the text is not an expression of
    numbers, + - * / and parentheses, or `calculate` refuses an operation.
    """
    text = expression.strip()
    if len(text) > LONGEST or not _ARITHMETIC.fullmatch(text):
        raise ValueError(f"{text!r:.100} is not an expression of numbers, + - * / and parentheses")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.100} is not an expression: {error}") from error
    found: list[Operation] = []
    return found, _value(tree, text, found)


def _value(node: ast.expr, text: str, found: list[Operation]) -> str:
    """The value of a part of `text`. Its operations are added to `found`."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            first, second = _value(left, text, found), _value(right, text, found)
            operation = f"{first}{_SIGNS[type(op)]}{second}"
            found.append(Operation(operation, calculate(operation)))
            return found[-1].result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, text, found)
            return value.removeprefix("-") if value.startswith("-") else f"-{value}"
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text, found)
        case ast.Constant():
            return text[node.col_offset : node.end_col_offset]
    raise ValueError(f"{text!r:.100} has an operator other than + - * /")


def _text(value: Fraction) -> str:
    scaled = round(value * 10**DECIMALS)
    whole, decimals = divmod(abs(scaled), 10**DECIMALS)
    text = f"{whole}.{decimals:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text
