"""One operation is worked out exactly, and a longer expression becomes single operations."""

from __future__ import annotations

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.arithmetic import LONGEST, calculate, operations


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
    with pytest.raises(ValueError, match=reason):
        calculate(expression)


@given(st.integers(), st.sampled_from("+-*"), st.integers())
def test_integers_have_integer_results(left: int, sign: str, right: int):
    function = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign]
    assert calculate(f"{left}{sign}{right}") == str(function(left, right))


@given(st.decimals(-1000, 1000, places=3), st.decimals(-1000, 1000, places=3).filter(bool))
def test_quotients_are_right_to_six_decimals(left: object, right: object):
    exact = Fraction(str(left)) / Fraction(str(right))
    assert abs(Fraction(calculate(f"{left}/{right}")) - exact) <= Fraction(1, 2_000_000)


@pytest.mark.parametrize(
    ("expression", "expected", "result"),
    [
        ("48/2", ["48/2"], "24"),
        ("100-50-30-15", ["100-50", "50-30", "20-15"], "5"),
        ("2 + 3 * 4", ["3*4", "2+12"], "14"),
        ("(2+3)*4", ["2+3", "5*4"], "20"),
        ("-( 2 - 5 ) * -1.50", ["2-5", "3*-1.50"], "-4.5"),
        ("2--1", ["2--1"], "3"),
        ("+.5*4", [".5*4"], "2"),
        ("1/3*6", ["1/3", "0.333333*6"], "1.999998"),
        (" 7 ", [], "7"),
        ("--7", [], "7"),
    ],
)
def test_a_longer_expression_becomes_operations_in_the_order_of_arithmetic(
    expression: str, expected: list[str], result: str
):
    found, value = operations(expression)
    assert ([each.expression for each in found], value) == (expected, result)
    assert [each.result for each in found] == [calculate(each) for each in expected]


@pytest.mark.parametrize(
    "expression",
    ["", "2+", "7//2", "2**9", "1e9", "1_000", "5%", "x+1", "٣+1", "()", "(1)(2)", "007+1", "1/0", "2\n+3", "(" * 900],
)
def test_an_expression_that_is_no_arithmetic_is_refused(expression: str):
    with pytest.raises(ValueError, match=r"is not an expression|operator other than|division by zero"):
        operations(expression)


def test_an_expression_that_would_take_long_to_read_is_refused():
    with pytest.raises(ValueError, match="is not an expression"):
        operations("+".join("1" * LONGEST))


@given(
    st.recursive(
        st.integers(0, 99).map(str), lambda inner: st.builds("({}{}{})".format, inner, st.sampled_from("+-*"), inner)
    )
)
def test_the_operations_lead_to_the_value_of_the_expression(expression: str):
    found, value = operations(expression)
    assert int(value) == eval(expression)
    assert len(found) == sum(expression.count(sign) for sign in "+-*")
