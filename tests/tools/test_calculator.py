"""One operation a call, exactly."""

from __future__ import annotations

import asyncio
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tools import ToolRefusal
from asyncrl.tools.calculator import Calculator, calculate
from asyncrl.tools.delayed import SlowCalculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("5*3", "15"),
        (" 17 + 5 ", "22"),
        ("8-17", "-9"),
        ("-5*-3", "15"),
        ("5--3", "8"),
        ("5+-3", "2"),
        ("6/3", "2"),
        ("0.1+0.2", "0.3"),
        (".5*4.", "2"),
        ("2/3", "0.666667"),
        ("-2/3", "-0.666667"),
        ("1/8", "0.125"),
        ("-1/10000000", "0"),
        ("100*100", "10000"),
        ("99999999999999999999*10", "999999999999999999990"),
    ],
)
def test_the_result_is_short_and_exact(expression: str, result: str):
    assert calculate(expression) == result


REFUSED = ["", "5", "5*3+1", "(5*3)", "a+b", "1,000+1", "5 3", "2**3", "1e3+1", "٣+1", "5*\n"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [*((each, r"such as 5\*3") for each in REFUSED), ("5/0.0", "division by zero"), ("9" * 41 + "+1", "at most 40")],
)
def test_anything_else_is_refused_with_an_example_or_the_reason(expression: str, reason: str):
    with pytest.raises(ToolRefusal, match=reason):
        calculate(expression)


@given(st.integers(), st.sampled_from("+-*"), st.integers())
def test_integers_have_integer_results(left: int, sign: str, right: int):
    function = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign]
    assert calculate(f"{left}{sign}{right}") == str(function(left, right))


@given(st.decimals(-1000, 1000, places=3), st.decimals(-1000, 1000, places=3).filter(bool))
def test_quotients_are_right_to_six_decimals(left: object, right: object):
    exact = Fraction(str(left)) / Fraction(str(right))
    assert abs(Fraction(calculate(f"{left}/{right}")) - exact) <= Fraction(1, 2_000_000)


def test_to_the_policy_the_slow_calculator_is_the_calculator():
    async def delays(episode: str) -> list[float]:
        tool = SlowCalculator(episode)
        await tool.create(scale_s=1e-4, max_s=1e-2)
        assert await tool.execute({"expression": "5*3"}) == "15"
        return [tool.next_delay_s() for _ in range(3)]

    assert SlowCalculator.schema is Calculator.schema
    assert asyncio.run(delays("t1")) == asyncio.run(delays("t1")) != asyncio.run(delays("t2"))
