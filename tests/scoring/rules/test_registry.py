import textwrap

import pytest

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.base import read_verdict
from asyncrl.scoring.rules.exact_match import exact_match
from asyncrl.scoring.rules.registry import load_rules
from tests.scoring.fakes import answered

MODULE = """
def own(task, answer, trajectory):
    return {"score": len(answer), "turns": len(trajectory.turns)}

def verl(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, ground_truth, extra_info) == ("test", "72", {})
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}

def verl_with_more(data_source, solution_str, ground_truth, extra_info=None, sandbox=None, **kwargs):
    return True

def gsm8k(solution_str, ground_truth, method="strict"):
    return 1.0

constant = 3
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """The name of a module of somebody's rules."""
    (tmp_path / "somebodys_rewards.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_rewards.py").write_text("1 +")
    monkeypatch.syspath_prepend(tmp_path)
    return "somebodys_rewards"


def judge(name, answer="72"):
    task, trajectory = answered(answer)
    return load_rules(name, {}).judge(task, answer, trajectory)


def test_a_function_of_ones_own_is_a_dotted_path(rewards):
    verdict = judge(f"{rewards}.own")
    assert verdict.outcome == 2.0
    assert verdict.extra == {"turns": 4.0}


def test_a_function_written_for_verl_is_used_as_it_is(rewards):
    verdict = judge(f"{rewards}.verl")
    assert verdict.outcome == 1.0
    assert verdict.extra == {"acc": 1.0}
    assert judge(f"{rewards}.verl_with_more").outcome == 1.0


def test_every_data_source_can_have_its_rule(rewards):
    book = load_rules("exact_number", {"test": f"{rewards}.own", "other": "exact_match"})
    task, trajectory = answered("four")
    assert book.judge(task, "four", trajectory).outcome == 4.0
    assert book.by_source["other"] is exact_match


def test_exact_match_ignores_only_outer_white_space():
    assert judge("exact_match", " 72\n").outcome == 1.0
    assert judge("exact_match", "72.0").outcome == 0.0


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("exact_nubmer", "use one of exact_match, exact_number, or the dotted path"),
        ("no_such_module.rule", "No module named 'no_such_module'.*on PYTHONPATH"),
        ("somebodys_rewards.absent", "no attribute 'absent'.*give module.function"),
        ("broken_rewards.rule", "SyntaxError"),
        ("somebodys_rewards.constant", r"write a function with the parameters \(task, answer, trajectory\)"),
        ("somebodys_rewards.gsm8k", r"or verl's \(data_source, solution_str, ground_truth, extra_info\)"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_with_the_fix(rewards, name, fix):
    with pytest.raises(ConfigError, match=f"(?s)scoring.rule={name}.*{fix}"):
        load_rules(name, {})
    with pytest.raises(ConfigError, match=f"scoring.rules.somewhere={name}"):
        load_rules("exact_match", {"somewhere": name})


@pytest.mark.parametrize("result", [None, "1", float("nan"), float("inf"), {"acc": 1}, {"score": None}, [1.0]])
def test_a_senseless_result_is_a_failure_and_not_a_zero(result):
    with pytest.raises(ScoringError):
        read_verdict(result)
