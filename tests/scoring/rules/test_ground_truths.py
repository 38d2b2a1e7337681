"""A ground truth that a rule cannot use is a failure and never a zero."""

import json
import sys
from collections.abc import Iterator

import pytest

from asyncrl.errors import ScoringError
from tests.scoring.fakes import rules_of


@pytest.mark.parametrize(
    ("rule", "truth", "reason"),
    [
        ("exact_number", "seventy-two", "holds no number"),
        ("gsm8k", "seventy-two", "holds no number"),
        ("math", "", "holds no expression"),
        ("multiple_choice", "Paris", "names no option"),
        ("f1", "...", "has no words"),
        ("json_schema", "nonsense", "schema"),
        ("json_schema", '{"type": "no such type"}', "schema"),
        ("json_schema", '{"$ref": "https://example.com/a.json"}', "schema"),
        ("json_schema", '{"$ref": "#"}', "without end"),
        *[("code", truth, "tests") for truth in ("", "{}", '{"inputs": [], "outputs": []}', "{1")],
        ("code", '{"inputs": ["1"], "outputs": []}', "tests"),
        ("code", " assert add(1, 2) == 3", "tests"),
        *[("tool_calls", truth, "JSON list of calls") for truth in ("72", '"f"', '[{"arguments": {}}]', "f(1)")],
        ("tool_calls", '[{"name": "f", "arguments": 3}]', "JSON list of calls"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_a_failure(rule, truth, reason):
    with pytest.raises(ScoringError, match=reason):
        rules_of(rule)("[]", truth)


def test_the_ground_truth_may_name_an_option_for_which_the_answer_is_wrong():
    assert [rules_of("multiple_choice")("The answer is C", truth).outcome for truth in ("C", "(B)")] == [1.0, 0.0]


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own limit: torch raises it when it compiles, which another test of this process may have done."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
def test_an_answer_nested_too_deep_for_a_recursive_schema_is_worth_nothing():
    score = rules_of("json_schema")
    nested = json.dumps({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}})
    assert score("[[[]]]", nested).outcome == 1.0
    for answer in ("[" * 400 + "]" * 400, "[" * 100_000):
        assert score(answer, nested).outcome == score(answer, '{"type": "object"}').outcome == 0.0
