"""The tools of the demo's harder tasks (the ladder): a calculator that remembers the expression, the same calculator
with delays, and a tool that undoes a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from asyncrl.commands.demo.ladder.expressions import Nested
from asyncrl.tools.base import Tool, ToolRefusal
from asyncrl.tools.delayed import Delayed

_STATES = "expressions"
"""Under this key, `shared` has the expressions of the episode, the oldest first."""


class LadderCalculator(Tool):
    """The arguments `{"operator": "*"}` work out one multiplication. The result is the remaining expression."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "calculator",
        "description": "Works out the leftmost operation with the given operator in the first of the innermost "
        "brackets, and returns the expression left.",
        "parameters": {
            "type": "object",
            "properties": {"operator": {"type": "string", "enum": ["+", "-", "*"]}},
            "required": ["operator"],
        },
    }

    async def create(self, **kwargs: Any) -> None:
        """Begin with the task's `expression`. If the prompt already shows some steps, `taken` has their operators."""
        states = [Nested(kwargs["expression"])]
        for operator in kwargs.get("taken") or ():
            states.append(states[-1].reduced(operator))
        self.shared[_STATES] = states

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        states: list[Nested] = self.shared[_STATES]
        operator = arguments["operator"]
        workplace = states[-1].workplace
        if operator not in workplace.operators:
            raise ToolRefusal(f"Error: there is no {operator} in {workplace}.")
        states.append(states[-1].reduced(operator))
        return states[-1].text


class SlowLadderCalculator(Delayed, LadderCalculator):
    """LadderCalculator with heavy-tailed delays."""


class Undo(Tool):
    """Takes back the last operation."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "undo",
        "description": "Takes back the last operation, and returns the expression before it.",
        "parameters": {"type": "object", "properties": {}},
    }

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        states: list[Nested] = self.shared[_STATES]
        if len(states) == 1:
            raise ToolRefusal("Error: there is nothing to take back.")
        states.pop()
        return states[-1].text
