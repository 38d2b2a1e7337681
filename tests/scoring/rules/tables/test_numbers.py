"""The ways in which models write numbers. `exact_number` reads every answer, `gsm8k` those with the mark."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scoring.rules.exact_number import final_number
from tests.scoring.fakes import rules_of
from tests.scoring.rules.tables.judging import assert_judged, rows, sections, table

TABLES = {title: table(text) for title, text in sections("numbers").items()}
SAME, EXPRESSIONS, RUNNING, STRAY = (TABLES[title] for title in ("same", "expressions", "running", "stray"))
OTHER = [*TABLES["other"], ("", "72"), ("9" * 5000, "9"), ("9^" + "9" * 50, "9")]
LONGER = [(f"#### {each}", "1") for each in rows("1,2345 | 1.234,50 | 1,2,3 | 1e3 | 1e3000 | 1½ | 1 000 | 1/2/3")]
"""Numbers that only begin like the ground truth."""
FRAMES = ("#### {}", r"So \boxed{{{}}}", "<answer>{}</answer>", "<answer>{} in all</answer>")


def test_exact_number_reads_numbers_as_models_write_them():
    framed = [(frame.format(each), truth) for each, truth in EXPRESSIONS for frame in FRAMES]
    assert_judged("exact_number", SAME + RUNNING, OTHER + STRAY + LONGER + framed)


def test_gsm8k_reads_them_behind_the_mark():
    framed = [(f"8 and 9.\n#### {answer}", truth) for answer, truth in [*SAME, *TABLES["marked"]]]
    wrong = [(f"8 and 9.\n#### {answer}", truth) for answer, truth in OTHER + EXPRESSIONS]
    unmarked = TABLES["without a number at the mark"]
    assert_judged("gsm8k", framed + TABLES["with the mark"], wrong + STRAY + LONGER + unmarked)


def test_gsm8k_without_its_mark_reads_as_exact_number_does():
    assert_judged("gsm8k", SAME + RUNNING, OTHER + STRAY, strict=False)


def test_both_read_the_published_solutions():
    lines = (Path(__file__).parents[3] / "data" / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    numbers = [solution.rpartition("#### ")[2] for solution in solutions]
    right = list(zip(solutions, numbers, strict=True))
    wrong = [(solution, str(int(number.replace(",", "")) + 1)) for solution, number in right]
    assert_judged("gsm8k", right, wrong)
    boxed = [(solution.replace("#### ", "The answer is $\\boxed{") + "}$.", number) for solution, number in right]
    assert_judged("exact_number", right + boxed, wrong)


def test_gsm8k_may_be_lenient_and_tolerant():
    assert rules_of("gsm8k", strict=False)("it is 72", "72").outcome == 1.0
    within = rules_of("gsm8k", tolerance=0.001)
    assert [within(f"#### {each}", "3.14159").outcome for each in ("3.1416", "3.15")] == [1.0, 0.0]


@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4),
    st.sampled_from(["{}", "it is {}.", "1, 2, then {} units", "x = {}\n", "old 7 #### {} and 9"]),
    st.sampled_from(["{:.4f}", "{:,.4f}", "{:+.4f}", "{:+,.4f}"]),
)
def test_any_number_is_read_exactly_in_any_dress(number, frame, dress):
    assert final_number(frame.format(dress.format(number))) == Fraction(number)


@pytest.mark.slow
@given(st.text(alphabet="0123456789.,-+/# a\\frac{}$", max_size=200))
def test_no_text_breaks_them(text):
    for rule in ("gsm8k", "exact_number"):
        assert rules_of(rule)(text).outcome in (0.0, 1.0)


@pytest.mark.parametrize("text", ["9" * 50_000, "1" + ",111" * 20_000 + "1", "1/" + "0" * 50_000, "-" * 50_000])
def test_monstrous_text_is_read_quickly_and_is_no_number(text):
    assert final_number(text) != 72
