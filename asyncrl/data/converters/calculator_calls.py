"""Makes demonstrations from known solutions: each calculation of a solution is a call of the tool `calculator`.

The tool does one operation a call, so a longer calculation becomes several calls. A solution whose result differs from
the calculator's becomes no demonstration: the policy would learn to contradict its tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Any, NamedTuple

from asyncrl.arithmetic import Operation, operations

TOOL = "calculator"
"""The name of the tool in its schema."""

_RESULT = re.compile(r"\s*[+-]?[0-9.]+(/[1-9][0-9]*)?\s*")
_MARKS = re.compile("<<|>>")
"""The marks around a calculation. The text between calculations has one only if a calculation is not marked in the form
<<48/2=24>>."""


class LeftOut(StrEnum):
    """The reason for which a row has no demonstration, as the end of `rows that ...`."""

    NO_CALCULATION = "have no calculation"
    NOT_CONFIRMED = "have a calculation that the calculator does not confirm"
    BROKEN = "mark a calculation in a form other than <<48/2=24>>"


class Calculation(NamedTuple):
    """A calculation in a solution: the text before it, the expression, and the result that the solution gives."""

    text: str
    expression: str
    result: str


def demonstration(
    prompt: Iterable[Mapping[str, Any]], calculations: Iterable[Calculation], ending: str
) -> list[Mapping[str, Any]] | LeftOut:
    """The messages of an episode that solves the task of `prompt`. The last turn ends with the text `ending`."""
    messages, calculations = list(prompt), list(calculations)
    if any(_MARKS.search(text) for text in (ending, *(each.text for each in calculations))):
        return LeftOut.BROKEN
    prompts, text = len(messages), ""
    for calculation in calculations:
        text += calculation.text
        found = _confirmed(calculation)
        if found is None:
            return LeftOut.NOT_CONFIRMED
        for operation in found:
            messages += _call(text.strip(), operation)
            text = ""
    if len(messages) == prompts:
        return LeftOut.NO_CALCULATION
    return [*messages, {"role": "assistant", "content": (text + ending).strip()}]


def _confirmed(calculation: Calculation) -> Sequence[Operation] | None:
    """The operations of a calculation; None if the calculator has another result."""
    # A result such as 1e999999999 would take all memory.
    if not _RESULT.fullmatch(calculation.result):
        return None
    try:
        found, value = operations(calculation.expression)
        return found if Fraction(value) == Fraction(calculation.result) else None
    except ValueError:  # It is not an expression of numbers, or its result is not a number.
        return None


def _call(text: str, operation: Operation) -> Sequence[Mapping[str, Any]]:
    """A turn that calls the calculator, and the tool's result."""
    arguments = json.dumps({"expression": operation.expression})
    call = {"type": "function", "function": {"name": TOOL, "arguments": arguments}}
    return (
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "content": operation.result},
    )
