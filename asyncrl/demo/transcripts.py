"""Worked transcripts of the demo's task as chat messages, and as token ids with a mask of the assistant's part."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from asyncrl.demo.arithmetic import Expression, opening

TOOL_SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}

Message = dict[str, Any]


def call_turn(line: str, operation: str) -> Message:
    function = {"name": "calculator", "arguments": {"expression": operation}}
    return {"role": "assistant", "content": line, "tool_calls": [{"type": "function", "function": function}]}


def demonstration(expression: Expression, rng: random.Random) -> list[Message]:
    """Well-formed calls and exact copying, but the operations in random order, as if any order were right."""
    messages: list[Message] = [*opening(expression)]
    while expression.operators:
        operator = rng.choice(expression.operators)
        index = expression.operators.index(operator)
        messages.append(call_turn(f"{operator}:{expression.marked(index)}", expression.operation(index)))
        messages.append({"role": "tool", "content": str(expression.result(index))})
        expression = expression.replaced(index)
    return [*messages, {"role": "assistant", "content": str(expression)}]
