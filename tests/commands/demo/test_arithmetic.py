"""The demo's expressions, their calculator, and what the transcripts show."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.commands.demo.arithmetic import (
    Expression,
    arithmetic_task,
    distinct_expressions,
    parse,
    random_expression,
)
from asyncrl.commands.demo.step_scorer import GSM8K
from asyncrl.commands.demo.tool import StepCalculator
from asyncrl.commands.demo.transcripts import demonstration, judged
from asyncrl.tools import ToolRefusal

expressions = st.integers().map(lambda seed: random_expression(random.Random(seed)))
numbers = st.integers(-999, 999)
worked = st.lists(st.tuples(numbers, st.sampled_from("+-*")), max_size=4).flatmap(
    lambda pairs: numbers.map(lambda last: Expression((*(n for n, _ in pairs), last), tuple(o for _, o in pairs)))
)


def answer(operator: str, expression: str) -> str:
    return asyncio.run(StepCalculator("episode").execute({"operator": operator, "expression": expression}))


@pytest.mark.slow
@given(worked)
def test_the_value_is_that_of_the_usual_precedence(expression: Expression) -> None:
    assert expression.value() == eval(str(expression))


@pytest.mark.slow
@given(worked)
def test_an_expression_is_read_back_from_its_text(expression: Expression) -> None:
    assert parse(str(expression)) == expression


def test_the_shipped_calculations_are_different_expressions_of_two_to_four_steps() -> None:
    found = [parse(line) for line in GSM8K.read_text().split()]
    assert len(set(found)) == len(found) == 1490
    assert all(each is not None and 2 <= len(each.operators) <= 4 for each in found)


@pytest.mark.parametrize("text", ["", "7+", "+7", "7/2", "7 + 2", "(7+2)", "7++2", "1.5+2", "7+-", "٣+٤"])
def test_other_text_is_no_expression(text: str) -> None:
    assert parse(text) is None


@given(expressions)
def test_tasks_have_two_to_four_operations_and_their_value_as_ground_truth(expression: Expression) -> None:
    assert 2 <= len(expression.operators) <= 4
    assert arithmetic_task(expression, "train", 3).ground_truth == str(eval(str(expression)))


def test_held_out_expressions_are_not_among_those_for_training() -> None:
    held_out = distinct_expressions(50, random.Random(0))
    training = distinct_expressions(500, random.Random(0), avoid=held_out)
    assert len({*held_out, *training}) == 550


def test_the_calculator_works_out_the_leftmost_operation_of_the_operator() -> None:
    assert answer("*", "7+5*3-8*2") == "7+15-8*2"
    assert answer("+", "7+5*3") == "12*3"
    assert answer("-", "5--3") == "8"


@pytest.mark.parametrize(("operator", "expression"), [("*", "7+5"), ("+", "seven"), ("+", "7")])
def test_the_calculator_refuses_with_a_text_for_the_policy(operator: str, expression: str) -> None:
    with pytest.raises(ToolRefusal, match="Error: "):
        answer(operator, expression)


def test_demonstrations_take_the_first_operator_at_random() -> None:
    rng = random.Random(0)
    expression = Expression((7, 5, 3), ("+", "*"))
    firsts = [
        demonstration(expression, rng)[2]["tool_calls"][0]["function"]["arguments"]["operator"] for _ in range(200)
    ]
    assert 70 < firsts.count("+") < 130


@pytest.mark.slow
@given(expressions, st.randoms(use_true_random=False))
def test_demonstrations_copy_exactly_what_the_calculator_left(expression: Expression, rng: random.Random) -> None:
    messages = demonstration(expression, rng)[1:]
    for before, turn, result in zip(messages[::2], messages[1::2], messages[2::2], strict=False):
        arguments = turn["tool_calls"][0]["function"]["arguments"]
        assert arguments["expression"] == before["content"]
        assert result["content"] == answer(**arguments)
    assert messages[-1]["content"] == messages[-2]["content"]


@pytest.mark.slow
@given(expressions, st.randoms(use_true_random=False))
def test_a_transcript_of_right_steps_only_ends_in_the_value(expression: Expression, rng: random.Random) -> None:
    messages, right = judged(expression, rng)
    assert len(right) == sum(message["role"] == "assistant" for message in messages)
    if all(right):
        assert int(messages[-1]["content"]) == expression.value()


def test_judged_steps_are_right_and_wrong_in_good_measure() -> None:
    rng = random.Random(0)
    right = [step for _ in range(500) for step in judged(random_expression(rng), rng)[1]]
    assert 0.35 < sum(right) / len(right) < 0.85
