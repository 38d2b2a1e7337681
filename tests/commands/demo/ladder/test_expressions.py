"""Expressions with brackets, by an evaluator of their own: Python's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.commands.demo.ladder.expressions import LARGEST_VALUE, Nested, distinct_nested, random_nested

expressions = st.builds(
    lambda seed, count: random_nested(random.Random(seed), count), st.integers(), st.integers(2, 10)
)


def evaluated(expression: Nested) -> int:
    value = eval(expression.text)
    assert isinstance(value, int)
    return value


@given(expressions)
def test_the_value_is_that_of_the_usual_rules(expression: Nested) -> None:
    assert expression.value() == evaluated(expression)


@pytest.mark.slow
@given(expressions)
def test_right_steps_keep_the_value_and_take_one_operation_each(expression: Nested) -> None:
    steps = expression.worked_out()
    assert {evaluated(step) for step in steps} == {expression.value()}
    operations = [sum(operator in "+*-" for operator in step.text.replace("(-", "(")) for step in steps[:1]]
    assert operations == [len(steps) - 1]
    assert all(abs(number) <= LARGEST_VALUE for step in steps for number in step.workplace.numbers)


@pytest.mark.slow
@given(expressions, st.randoms(use_true_random=False))
def test_any_order_of_operators_ends_in_a_number(expression: Nested, rng: random.Random) -> None:
    while not expression.is_number:
        expression = expression.reduced(rng.choice(expression.workplace.operators))
    assert int(expression.text) == evaluated(expression)


def test_the_calculator_works_in_the_first_of_the_innermost_brackets() -> None:
    expression = Nested("2*(3+(4-5*6))-(7+8)")
    assert str(expression.workplace) == "4-5*6"
    assert expression.reduced("*") == Nested("2*(3+(4-30))-(7+8)")
    assert expression.reduced("*").reduced("-") == Nested("2*(3+-26)-(7+8)")
    assert expression.right_operator() == "*"
    with pytest.raises(ValueError, match="not in tuple"):
        expression.reduced("+")


@pytest.mark.parametrize("text", ["", "()", "(2+3", "2+3)", "2(3+4)", "(2+3)4", "2+", "2/3", "2 + 3", ")2+3("])
def test_other_text_is_no_expression(text: str) -> None:
    with pytest.raises(ValueError, match="is not an expression"):
        Nested(text)


def test_held_out_expressions_are_not_among_those_for_training() -> None:
    held_out = distinct_nested(20, random.Random(0), (2,))
    training = distinct_nested(200, random.Random(0), (2,), avoid=held_out)
    assert len({*held_out, *training}) == 220
