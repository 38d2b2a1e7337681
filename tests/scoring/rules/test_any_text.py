"""Every rule gives every text a score, in time that grows with its length and not with the square of it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.answers import after_thoughts
from asyncrl.scoring.rules.exact_number import final_number
from asyncrl.scoring.rules.multiple_choice import option
from asyncrl.scoring.rules.program import program
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.scoring.rules.text import boxes, fenced_blocks, tagged
from tests.scoring.fakes import rule_input
from tests.scoring.rules.tables.judging import rows

pytestmark = pytest.mark.slow

TRUTHS = {
    "exact_match": "72",
    "exact_number": "72",
    "f1": "the Paris",
    "format": "",
    "gsm8k": "72",
    "json_schema": '{"type": "object"}',
    "math": r"\frac{1}{2}",
    "multiple_choice": "C",
    "tool_calls": "[]",
}
RULES = {rule: load_rules(ScoringConfig(rule=rule)) for rule in TRUTHS}
PIECES = rows(r"""
72 | 1/2 | \frac | { | } | 10^6 | ⁶ | ½ | - | $ | C | ( | ) | answer | is | correct | or | not | <answer> | </answer>
<think> | </think> | \boxed{ | ``` | ~~~ | json | python | #### | [ | ] | " | ^ | ** | e | . | , | =
""")
PIECES += ["\n", " ", "\ud800", "\x00", "9" * 400]
SNIPPETS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@pytest.mark.parametrize("rule", TRUTHS)
@given(text=SNIPPETS | st.text(max_size=60))
def test_a_rule_gives_any_text_a_score(rule, text):
    assert 0.0 <= RULES[rule].score(rule_input(text, truth=TRUTHS[rule])).outcome <= 1.0


@given(text=SNIPPETS | st.text(max_size=60))
def test_any_text_holds_some_program(text):
    assert isinstance(program(text), str)


HOSTILE = [
    *("1", ",111", "1 ", " ", "\n", "-", "^", "1^", r"\frac{1}", "{", r"\boxed{", r"\boxed{1}", "=", "1=", "½", "1¹"),
    *("answer ", "answer is ", "the answer is C or ", "answer a b c ", "C ", "(C) ", "so C", "not ", "C is ", "C) "),
    *("```", "```\n", "```x\n", "~~~\n", "   ```\n", "```\n```\n", "<answer>", "<think>", "</think>", "a\n", "x = "),
]
READERS = [final_number, option, program, boxes, tagged, after_thoughts, lambda text: list(fenced_blocks(text))]


def processor_time(text):
    """Seconds that all readers take for the text, the least of two."""
    taken = []
    for _ in range(2):
        start = time.process_time()
        for read in READERS:
            read(text)
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize("piece", HOSTILE)
def test_what_is_read_takes_time_in_proportion_to_the_length(piece):
    short, long = (piece * (length // len(piece)) for length in (2_000, 32_000))
    # Sixteen times the text: a reader whose time grows with the square would take 256 times as long.
    assert processor_time(long) < 80 * processor_time(short) + 0.1


@pytest.mark.parametrize("opening", ["(", "[", "-", "not ", "lambda:", "f(", "a.", "1+", "if 1:\n", "{1:"])
def test_a_program_nested_without_end_is_still_only_a_text(opening):
    assert isinstance(program(f"```python\n{opening * 50_000}1\n```"), str)
