"""Tables of answers as models write them, and the assertion that a rule judges every row as the table says."""

import re
from pathlib import Path

from tests.scoring.fakes import rules_of

LEAST = 40
"""Rows that each half of a table has at least."""


def rows(text):
    """The entries of a text, which ` | ` and line ends separate; ⏎ is a line end within an entry."""
    return [entry.replace("⏎", "\n") for line in text.strip().split("\n") for entry in line.split(" | ")]


def table(text):
    """Pairs of an answer and its ground truth, from lines `TRUTH : ANSWER | ANSWER ...`."""
    lines = [line.split(" : ", 1) for line in text.strip().split("\n")]
    return [(answer, truth.replace("⏎", "\n")) for truth, answers in lines for answer in rows(answers)]


def sections(name):
    """The texts of `name`.txt by their titles, which stand in square brackets on a line of their own."""
    text = Path(__file__).with_name(f"{name}.txt").read_text("utf-8")
    _, *found = re.split(r"^\[([a-z ]+)\]$", text, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def assert_judged(rule, right, wrong, **params):
    """`right` and `wrong` are pairs of an answer and its ground truth; every wrong judgement is named."""
    assert len(right) >= LEAST <= len(wrong)
    score = rules_of(rule, **params)
    expected = [(1.0, *row) for row in right] + [(0.0, *row) for row in wrong]
    found = [(wanted, score(*row).outcome, *row) for wanted, *row in expected]
    misjudged = [f"{answer!r} for {truth!r} scores {got}" for wanted, got, answer, truth in found if got != wanted]
    assert not misjudged, "\n".join(misjudged)
