"""The examples of docs/writing_a_reward.md, run as they stand there."""

import re
from pathlib import Path

import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.verifier import Verifier
from tests.scoring.fakes import rule_input

PAGE = Path(__file__).parents[2] / "docs" / "writing_a_reward.md"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's text; its modules can be imported."""
    text = PAGE.read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / re.match(r'"""(\w+\.py)"""', code)[1]).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return text


def verify(name, answer):
    verifier = Verifier(ScoringConfig(rule=name))
    try:
        return verifier.score(rule_input(answer))
    finally:
        verifier.close()


def test_the_rule_on_the_page_judges(page):
    (name,) = re.findall(r"scoring\.rule=(my_rewards\.\w+)", page)
    right = verify(name, "I think so.\nAnswer: 72")
    assert right.outcome == 1.0
    assert right.scores == {"final_answer": 1.0, "final_answer/correct": 1.0, "final_answer/turns": 2.0}
    assert verify(name, "72").outcome == 0.0


def test_the_verl_function_on_the_page_judges(page):
    (name,) = re.findall(r"scoring\.rule=(verl_rewards\.\w+)", page)
    assert verify(name, "so 72").outcome == 1.0
    assert verify(name, "so 27").outcome == 0.0
