"""Tables of answers as models write them, and the assertion that a rule judges every row as the table says."""

from tests.scoring.fakes import rules_of

LEAST = 40
"""Rows that each half of a table has at least."""


def rows(text):
    """The entries of a text, which ` | ` and line ends separate."""
    return [entry for line in text.strip().split("\n") for entry in line.split(" | ")]


def table(text):
    """Pairs of an answer and its ground truth, from lines `TRUTH : ANSWER | ANSWER ...`."""
    lines = [line.split(" : ", 1) for line in text.strip().split("\n")]
    return [(answer, truth) for truth, answers in lines for answer in answers.split(" | ")]


def assert_judged(rule, right, wrong, **params):
    """`right` and `wrong` are pairs of an answer and its ground truth; every wrong judgement is named."""
    assert len(right) >= LEAST <= len(wrong)
    score = rules_of(rule, **params)
    expected = [(1.0, *row) for row in right] + [(0.0, *row) for row in wrong]
    found = [(wanted, score(*row).outcome, *row) for wanted, *row in expected]
    misjudged = [f"{answer!r} for {truth!r} scores {got}" for wanted, got, answer, truth in found if got != wanted]
    assert not misjudged, "\n".join(misjudged)
