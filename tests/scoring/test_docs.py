"""The page on scoring: it names every family with its parameters, and its examples run."""

import importlib
import re
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import ScoringConfig, ScoringModelConfig
from asyncrl.scoring.answers import texts_of_steps
from asyncrl.scoring.models.registry import OUTCOME_FAMILIES, PRM_FAMILIES
from asyncrl.scoring.step_rewards import StepFunction, StepInput
from asyncrl.scoring.transcript import Passage
from asyncrl.scoring.verifier import Verifier
from tests.scoring.fakes import CharTokenizer, lines, rule_input

PAGE = (Path(__file__).parents[2] / "docs" / "scoring.md").read_text()


@pytest.mark.parametrize("family", sorted({*PRM_FAMILIES, *OUTCOME_FAMILIES}))
def test_the_page_has_every_family_with_its_parameters(family):
    assert f"| `{family}` |" in PAGE
    for module in {families[family] for families in (PRM_FAMILIES, OUTCOME_FAMILIES) if family in families}:
        for each in fields(importlib.import_module(f"asyncrl.scoring.models.{module}").Params):
            assert re.search(rf"`(params\.)?{each.name}`", PAGE), each.name


def test_the_pages_own_model_scores():
    source = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class MyPRM" in code)
    names = {}
    exec(source, names)
    model = names["MyPRM"](ScoringModelConfig(params={"version": 2}))
    (scores,) = model.score([[Passage("q", False), Passage("abc", True)]])
    assert model.name == "lengths@2"
    np.testing.assert_allclose(scores.probability, [0.25])


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The text of the page. Its modules can be imported."""
    for code, name in re.findall(r'```python\n("""(\w+\.py)""".*?)```', PAGE, re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return PAGE


def test_the_function_of_steps_on_the_page_rewards_each_intermediate_result_once(page):
    (name,) = set(re.findall(r"scoring\.steps=(my_steps\.\w+)", page))
    task, trajectory = lines("first 12", "again 12", "then 30", "so 42")
    task = replace(task, extra_info={"results": ["12", "30", "42"]})
    given = StepInput(task, trajectory, texts_of_steps(trajectory, CharTokenizer()), "", "")
    assert StepFunction(name)(given) == [1.0, -0.1, 1.0, 1.0]


@pytest.mark.slow
def test_the_rules_on_the_page_judge(page):
    (own,) = re.findall(r"scoring\.rule=(my_rewards\.\w+)", page)
    (verl,) = re.findall(r"scoring\.rule=(verl_rewards\.\w+)", page)
    with closing(Verifier(ScoringConfig(rules={"test": own, "other": verl}))) as verifier:
        right = verifier.score(rule_input("I think so.\nAnswer: 72"))
        assert right.scores == {"final_answer": 1.0, "final_answer/correct": 1.0, "final_answer/turns": 2.0}
        assert verifier.score(rule_input("72")).outcome == 0.0
        answers = [verifier.score(rule_input(answer, source="other")).outcome for answer in ("so 72", "so 27")]
        assert answers == [1.0, 0.0]
