"""The rules that read the text of the answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.registry import load_rules
from tests.scoring.fakes import case


def judge(rule, answer, truth, **params):
    config = ScoringConfig(rules={"test": [{"name": rule, "params": params}]})
    return load_rules(config).judge(case(answer, truth=truth))


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("#### 72", "72"),
        ("so 5.\n####72 apples in 3 boxes", "She has 72.\n#### 72"),
        ("#### $1,234,567.50 dollars", "1234567.5"),
        ("#### -3 °C", "-3"),
        ("#### 3/4 cup", "0.75"),
        (r"#### \frac{3}{4}", ".75"),
        ("#### 1 1/2 hours", "1.5"),
        ("#### 5\nno: #### 72", "72"),
        ("#### 50%", "50"),
        (r"#### \$12", "12"),
        ("#### 1,000", "#### 1000"),
        ("#### 1 000 km", "1000"),
        ("#### 1,00,000", "100000"),
        ("#### 1e3", "1000"),
        ("#### 1½", "1.5"),
        ("#### ¾", "0.75"),
    ],
)
def test_gsm8k_reads_the_number_behind_the_mark(answer, truth):
    assert judge("gsm8k", answer, truth).outcome == 1.0


@pytest.mark.parametrize("answer", ["72", "", "72 ####", "#### 7 2", "#### 72/0", "#### -72", "#### seventy-two"])
def test_gsm8k_gives_nothing_for_another_number_or_no_mark(answer):
    assert judge("gsm8k", answer, "72").outcome == 0.0


@pytest.mark.parametrize("answer", ["1,2345", "1.234,50", "1,2,3", "1e3", "1e3000", "1½", "1 000", "1/2/3"])
def test_what_goes_on_behind_a_number_is_not_cut_off(answer):
    for rule in ("gsm8k", "exact_number"):
        assert judge(rule, f"#### {answer}", "1").outcome == 0.0


def test_gsm8k_may_be_lenient():
    assert judge("gsm8k", "it is 72", "72", strict=False).outcome == 1.0
    assert judge("gsm8k", "#### 3.1416", "3.14159", tolerance=0.001).outcome == 1.0
    assert judge("gsm8k", "#### 3.15", "3.14159", tolerance=0.001).outcome == 0.0


@given(st.text(alphabet="0123456789.,-+/# \\frac{}$", max_size=200))
def test_gsm8k_breaks_on_no_text(text):
    assert judge("gsm8k", text, "72").outcome in (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"The answer is $\boxed{\frac{1}{2}}$", "0.5"),
        (r"$x = \frac{1}{2}$, so $\boxed{0.5}$", r"\frac12"),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
        (r"$\boxed{2\sqrt{3}}$", r"$\sqrt{12}$"),
        ("so it is 72", "72"),
    ],
)
def test_math_compares_what_expressions_mean(answer, truth):
    assert judge("math", answer, truth).outcome == 1.0


@pytest.mark.parametrize("answer", [r"\boxed{\frac{1}{3}}", "", "no idea", r"\boxed{", r"\frac{1}{"])
def test_math_gives_nothing_for_another_expression_or_none(answer):
    assert judge("math", answer, r"\frac{1}{2}").outcome == 0.0


def test_math_needs_an_expression_to_compare_with():
    with pytest.raises(ScoringError, match="holds no expression"):
        judge("math", "1", "")


@pytest.mark.parametrize(
    "answer",
    [
        "C",
        "C.",
        "C) Paris",
        "(C)",
        "The answer is C",
        "Answer: (C).",
        "the ANSWER is: **C**",
        "(A) is wrong, so (C)",
        "A looks good. But the answer is C, not (B).",
        r"\boxed{C}",
        r"A. Final: \boxed{\text{C}}",
        "#### C",
        "the answer is option C",
        "C is correct",
        "The correct option is C",
        "Option A is wrong. Option C",
        "I choose C. (B) is wrong.",
        "(c)",
        "The answer is (c)",
        r"\boxed{\mathrm{C}}",
        r"\boxed{\textbf{(C)}}",
    ],
)
def test_multiple_choice_reads_the_option_that_is_named(answer):
    assert judge("multiple_choice", answer, "C").outcome == 1.0
    assert judge("multiple_choice", answer, "(B)").outcome == 0.0


@pytest.mark.parametrize(
    "answer",
    ["", "Caesar", "the answer is Caesar", "I do not know", "C and D", "I choose C vitamins", "C is not correct"],
)
def test_multiple_choice_sees_no_option_where_there_is_none(answer):
    assert judge("multiple_choice", answer, "C").outcome == 0.0


def test_multiple_choice_needs_an_option_to_compare_with():
    with pytest.raises(ScoringError, match="names no option"):
        judge("multiple_choice", "C", "Paris")


@pytest.mark.parametrize(
    ("answer", "truth", "score", "exact"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("in Paris", "Paris", 2 / 3, 0.0),
        ("Berlin", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("a a a", "Paris", 0.0, 0.0),
        ("das ist Käse", "Käse ist das", 1.0, 0.0),
        ("Rome", '["Roma", "Rome"]', 1.0, 1.0),
        ("12", "12", 1.0, 1.0),
    ],
)
def test_f1_is_the_overlap_of_words(answer, truth, score, exact):
    verdict = judge("f1", answer, truth)
    assert verdict.scores == {"f1": pytest.approx(score), "f1/exact": exact}


def test_f1_needs_words_to_compare_with():
    with pytest.raises(ScoringError, match="has no words"):
        judge("f1", "Paris", "...")


SCHEMA = json.dumps(
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"a": 1}', 1.0),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', 1.0),
        ('```\n{"a": "x"}\n```\n```json\n{"a": 2}\n```', 1.0),
        ('{"a": "1"}', 0.0),
        ('{"a": 1, "b": 2}', 0.0),
        ("{}", 0.0),
        ("no json", 0.0),
        ("[" * 100_000, 0.0),
        ("[" * 400 + "]" * 400, 0.0),
    ],
)
def test_json_schema_accepts_what_fits(answer, score):
    assert judge("json_schema", answer, SCHEMA).outcome == score


def test_an_answer_nested_too_deep_for_a_recursive_schema_is_worth_nothing():
    nested = json.dumps({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}})
    assert judge("json_schema", "[[[]]]", nested).outcome == 1.0
    assert judge("json_schema", "[" * 400 + "]" * 400, nested).outcome == 0.0
    with pytest.raises(ScoringError, match="without end"):
        judge("json_schema", "[]", json.dumps({"$ref": "#"}))


@pytest.mark.parametrize("schema", ["nonsense", '{"type": "no such type"}', '{"$ref": "https://example.com/a.json"}'])
def test_a_schema_that_cannot_be_used_is_a_failure_and_not_a_zero(schema):
    with pytest.raises(ScoringError, match="schema"):
        judge("json_schema", "{}", schema)
