"""Calculations out of GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.demo.arithmetic import parse
from asyncrl.demo.gsm8k import OPERATIONS, calculations, excerpt

PROBLEMS = Path(__file__).parent.parent / "data" / "gsm8k" / "train.jsonl"


def found(*answers: str) -> list[str]:
    return [str(expression) for expression in calculations(answers)]


def test_a_calculation_takes_in_the_earlier_results_that_it_goes_on_with() -> None:
    assert found("12 x 2 = <<12*2=24>>24 pages, then 12 + 24 = <<12+24=36>>36") == ["12+12*2"]
    assert found("<<2*3=6>>6 <<6+4=10>>10 <<10-6=4>>4") == ["2*3+4", "2*3+4-2*3"]


def test_a_result_that_would_need_parentheses_stays_a_number() -> None:
    assert found("<<12+24=36>>36 <<120-36=84>>84 <<84*2*3=504>>504") == ["84*2*3"]


def test_calculations_with_fractions_mistakes_or_too_few_steps_are_left_out() -> None:
    assert found("<<48/2=24>>24 <<0.5*4*2=4>>4 <<1+2+3=7>>7 <<1+2=3>>3 <<50%=0.5>> <<5=5>>") == []


def test_results_belong_to_their_own_problem() -> None:
    assert found("<<12*2=24>>24", "<<12+24-1=35>>35") == ["12+24-1"]


def test_the_shipped_excerpt_begins_with_the_calculations_of_the_first_problems() -> None:
    answers = [json.loads(line)["answer"] for line in PROBLEMS.read_text().splitlines()]
    first = calculations(answers)
    shipped = excerpt()
    assert shipped[: len(first)] == first
    assert len(shipped) == len(set(shipped)) == 1490
    assert all(len(each.operators) in OPERATIONS and parse(str(each)) == each for each in shipped)
