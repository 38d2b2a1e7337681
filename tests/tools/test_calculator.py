"""The tool answers an operation, and refuses anything else with the fix."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.tools import ToolRefusal
from asyncrl.tools.calculator import Calculator
from asyncrl.tools.delayed import SlowCalculator


def test_a_call_is_answered_or_refused_with_the_reason():
    tool = Calculator("t1")
    assert asyncio.run(tool.execute({"expression": "5*3"})) == "15"
    with pytest.raises(
        ToolRefusal, match=r"^Error: write two numbers with one of \+ - \* / between them, such as 5\*3\.$"
    ):
        asyncio.run(tool.execute({"expression": "5*3+1"}))


def test_to_the_policy_the_slow_calculator_is_the_calculator():
    async def delays(episode: str) -> list[float]:
        tool = SlowCalculator(episode)
        await tool.create(scale_s=1e-4, max_s=1e-2)
        assert await tool.execute({"expression": "5*3"}) == "15"
        return [tool.next_delay_s() for _ in range(3)]

    assert SlowCalculator.schema is Calculator.schema
    assert asyncio.run(delays("t1")) == asyncio.run(delays("t1")) != asyncio.run(delays("t2"))
