"""The tool `calculator`. A call is one operation on two numbers, so a longer expression takes several turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from asyncrl.arithmetic import calculate
from asyncrl.tools.base import Tool, ToolRefusal


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
        try:
            return calculate(arguments["expression"])
        except ValueError as error:
            raise ToolRefusal(f"Error: {error}") from error
