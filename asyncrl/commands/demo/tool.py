"""The demo's calculator: each call works out the leftmost operation with the operator that the policy names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from asyncrl.commands.demo.arithmetic import parse
from asyncrl.tools.base import Tool, ToolRefusal
from asyncrl.tools.delayed import Delayed


class StepCalculator(Tool):
    """The arguments `{"operator": "*", "expression": "7+5*3-8"}` give the result `7+15-8`."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "calculator",
        "description": "Works out the leftmost operation with the given operator, and returns the expression left.",
        "parameters": {
            "type": "object",
            "properties": {
                "operator": {"type": "string", "enum": ["+", "-", "*"]},
                "expression": {"type": "string", "description": "whole numbers with + - * between them"},
            },
            "required": ["operator", "expression"],
        },
    }

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        expression = parse(arguments["expression"])
        if expression is None:
            raise ToolRefusal("Error: write whole numbers with + - * between them, such as 7+5*3.")
        if arguments["operator"] not in expression.operators:
            raise ToolRefusal(f"Error: there is no {arguments['operator']} in {expression}.")
        return str(expression.reduced(arguments["operator"]))


class SlowStepCalculator(Delayed, StepCalculator):
    """StepCalculator with heavy-tailed delays, to measure the cost of waiting for tools."""
