from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.exact_number import exact_number, final_number
from tests.scoring.fakes import answered


def judge(answer, truth):
    task, trajectory = answered(answer, truth=truth)
    return exact_number(task, answer, trajectory)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("72", "72"),
        ("17+5*11=72", "72"),
        ("She has 72 apples.", "72"),
        ("So\n#### 72", "72"),
        ("#### 72 apples in 3 boxes", "72"),
        ("#### 5\nno, #### 72", "72"),
        ("72.0", "72"),
        ("72.", "72"),
        ("It costs $1,234,567.50", "1234567.5"),
        ("-5", "-5"),
        ("x=-5", "-5"),
        ("x = −5", "-5"),
        ("10-5", "5"),
        ("(3)-5", "5"),
        ("+5", "5"),
        (".5", "0.5"),
        ("1/2", "0.5"),
        ("-3/4", "-0.75"),
        ("1,2,3", "3"),
        ("f(1,2345)", "2345"),
        ("50%", "50"),
        ("0.1", "1/10"),
        ("72", "She sold 48/2 = 24 clips.\n#### 72"),
        ("1000", "1,000"),
    ],
)
def test_the_same_number_is_worth_one(answer, truth):
    assert judge(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("", "72"),
        ("I do not know", "72"),
        ("72 or 73", "72"),
        ("-72", "72"),
        ("720", "72"),
        ("7 2", "72"),
        ("#### nothing", "72"),
        ("72 ####", "72"),
        ("5/0", "5"),
        ("0.30000000000000004", "0.3"),
        ("72.0000000000000000000000000001", "72"),
    ],
)
def test_another_number_or_none_is_worth_zero(answer, truth):
    assert judge(answer, truth) == 0.0


@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4),
    st.sampled_from(["{}", "it is {}.", "1, 2, then {} units", "x = {}\n", "old 7 #### {} and 9"]),
    st.sampled_from(["{:.4f}", "{:,.4f}", "{:+.4f}", "{:+,.4f}"]),
)
def test_any_number_is_read_exactly_in_any_dress(number, frame, dress):
    assert final_number(frame.format(dress.format(number))) == Fraction(number)


@given(st.text(alphabet="0123456789.,-+/# a", max_size=200))
def test_no_text_breaks_it(text):
    assert judge(text, "72") in (0.0, 1.0)


@pytest.mark.parametrize("text", ["9" * 50_000, "1" + ",111" * 20_000 + "1", "1/" + "0" * 50_000, "-" * 50_000])
def test_monstrous_text_is_read_quickly_and_is_no_number(text):
    assert judge(text, "72") == 0.0


def test_a_ground_truth_without_a_number_is_a_failure_and_not_a_zero():
    with pytest.raises(ScoringError, match="holds no number"):
        judge("72", "seventy-two")
