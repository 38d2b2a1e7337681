import sys
import textwrap

import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.base import read_result
from asyncrl.scoring.rules.registry import BUILT_IN, load_rules, rule_names
from tests.scoring.fakes import case

MODULE = """
def own(task, answer, trajectory):
    return {"score": len(answer), "turns": len(trajectory.turns)}

def own_with_options(task, answer, trajectory, *, factor=2.0):
    return factor * len(answer)

def verl(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, ground_truth, extra_info) == ("test", "72", {"num_turns": 4, "rollout_reward_scores": {}})
    return {"score": float(solution_str == "callok72"), "acc": True, "pred": solution_str}

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


def judge(rules, answer="72", **changes):
    """The verdict by a rule, or by a list of rules for the episode's data source."""
    config = ScoringConfig(rule=rules) if isinstance(rules, str) else ScoringConfig(rules={"test": rules})
    return load_rules(config).judge(case(answer, **changes))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_rule_loads(name):
    load_rules(ScoringConfig(rule=name))


def test_a_function_of_ones_own_is_a_dotted_path(rewards):
    verdict = judge(f"{rewards}.own")
    assert verdict.outcome == verdict.total == 2.0
    assert verdict.scores == {"own": 2.0, "own/turns": 4.0}


def test_a_function_written_for_verl_is_used_as_it_is_and_sees_the_whole_response(rewards):
    verdict = judge(f"{rewards}.verl")
    assert verdict.scores == {"verl": 1.0, "verl/acc": 1.0}
    assert judge(f"{rewards}.verl_with_more").outcome == 1.0


def test_every_data_source_can_have_its_rules(rewards):
    book = load_rules(ScoringConfig(rules={"test": f"{rewards}.own", "other": "exact_match"}))
    assert book.judge(case("four")).outcome == 4.0
    assert book.judge(case("72", source="other")).scores == {"exact_match": 1.0}
    assert book.judge(case("so 72", source="third")).scores == {"exact_number": 1.0}


def test_rules_are_added_by_weight_and_the_first_says_whether_the_answer_is_right(rewards):
    rules = [
        {"name": "gsm8k"},
        {"name": "format", "weight": 0.25, "params": {"pattern": "^so"}},
        {"name": f"{rewards}.own_with_options", "weight": -0.5, "params": {"factor": 0.25}},
    ]
    verdict = judge(rules, "so #### 71")
    assert verdict.outcome == 0.0
    assert verdict.scores == {"gsm8k": 0.0, "format": 1.0, "own_with_options": 2.5}
    assert verdict.total == 0.25 - 1.25
    assert judge(rules, "#### 72").outcome == 1.0
    config = ScoringConfig(rules={"test": rules})
    assert rule_names(config, "test") == f"gsm8k,format,{rewards}.own_with_options"
    assert rule_names(config, "other") == "exact_number"


def test_a_bare_name_in_a_list_weighs_one():
    assert judge(["exact_match", {"name": "format", "weight": 0}]).total == 1.0


def test_exact_match_ignores_only_outer_white_space():
    assert judge("exact_match", " 72\n").outcome == 1.0
    assert judge("exact_match", "72.0").outcome == 0.0


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("exact_nubmer", "use one of code, exact_match, .*, or the dotted path"),
        ("no_such_module.rule", "No module named 'no_such_module'.*on PYTHONPATH"),
        ("somebodys_rewards.absent", "no attribute 'absent'.*give module.function"),
        ("broken_rewards.rule", "SyntaxError"),
        ("somebodys_rewards.constant", r"write a function with the parameters \(task, answer, trajectory\)"),
        ("somebodys_rewards.gsm8k", r"verl's \(data_source, solution_str, ground_truth, extra_info\)"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_with_the_fix(rewards, name, fix):
    with pytest.raises(ConfigError, match=f"(?s)scoring.rule={name}.*{fix}"):
        load_rules(ScoringConfig(rule=name))
    with pytest.raises(ConfigError, match=f"scoring.rules.somewhere={name}"):
        load_rules(ScoringConfig(rules={"somewhere": [{"name": name}]}))


@pytest.mark.parametrize(
    ("rules", "fix"),
    [
        ([], "give the name of a rule"),
        (3, "give the name of a rule"),
        ([3], "each rule is a name, or"),
        ([{"name": "gsm8k", "wieght": 1}], "each rule is a name, or"),
        ([{"weight": 1.0}], "each rule is a name, or"),
        ([{"name": "gsm8k", "weight": "much"}], "the weight of gsm8k is 'much'"),
        (["gsm8k", "gsm8k"], "two rules of one name"),
        ([{"name": "format", "params": {"patern": "a"}}], "and params patern"),
    ],
)
def test_a_list_of_rules_that_cannot_be_used_is_refused_with_the_fix(rules, fix):
    with pytest.raises(ConfigError, match=f"scoring.rules.here.*{fix}"):
        load_rules(ScoringConfig(rules={"here": rules}))


@pytest.mark.parametrize(("rule", "library"), [("math", "math_verify"), ("json_schema", "jsonschema.exceptions")])
def test_a_rule_without_its_library_names_the_extra(monkeypatch, rule, library):
    monkeypatch.delitem(sys.modules, f"asyncrl.scoring.rules.{rule}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"needs the extra: pip install 'asyncrl\["):
        load_rules(ScoringConfig(rule=rule))


@pytest.mark.parametrize("result", [None, "1", float("nan"), float("inf"), {"acc": 1}, {"score": None}, [1.0]])
def test_a_senseless_result_is_a_failure_and_not_a_zero(result):
    with pytest.raises(ScoringError):
        read_result(result)
