"""Holds a rule to a table of answers as models write them."""

from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.rules.registry import load_rules
from tests.scoring.fakes import case

LEAST = 40
"""Rows that each half of a table has at least."""


def assert_judged(rule, right, wrong, **params):
    """`right` and `wrong` are rows of an answer and its ground truth; every wrong judgement is named."""
    assert len(right) >= LEAST <= len(wrong)
    book = load_rules(ScoringConfig(rules={"test": [{"name": rule, "params": params}]}))
    rows = [(1.0, *row) for row in right] + [(0.0, *row) for row in wrong]
    found = [(score, book.judge(case(answer, truth=truth)).outcome, answer, truth) for score, answer, truth in rows]
    misjudged = [f"{answer!r} for {truth!r} scores {got}" for score, got, answer, truth in found if got != score]
    assert not misjudged, "\n".join(misjudged)
