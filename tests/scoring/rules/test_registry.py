import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.base import read_result
from asyncrl.scoring.rules.registry import BUILT_IN, load_rules, rule_names
from tests.scoring.fakes import rule_input

MODULE = """
import asyncio
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

async def asynchronous(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return 1.0

async def own_asynchronous(task, answer, trajectory):
    return await asynchronous(None, None, None)

def timed(task, answer, trajectory, *, deadline):
    return {"score": 1.0, "deadline": deadline}

def retried(*args, **kwargs):
    return float(kwargs["solution_str"] == "callok72")

def verl_rest(solution_str, ground_truth, **rest):
    return float(rest["data_source"] == "test")

def configured(data_source, solution_str, ground_truth, extra_info, config=None):
    return config.buffer.len + config["buffer"]["len"] + config.get("more", 0) + hasattr(config, "more")

constant = 3
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """The name of a module with a user's rules."""
    (tmp_path / "somebodys_rewards.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_rewards.py").write_text("1 +")
    monkeypatch.syspath_prepend(tmp_path)
    return "somebodys_rewards"


def judge(rules, answer="72", **changes):
    """The scores by a rule, or by a list of rules for the episode's data source."""
    config = ScoringConfig(rule=rules) if isinstance(rules, str) else ScoringConfig(rules={"test": rules})
    return load_rules(config).score(rule_input(answer, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_rule_loads(name):
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="needs asyncrl[reasoning-gym]")
    load_rules(ScoringConfig(rule=name))


def test_a_function_of_ones_own_is_a_dotted_path(rewards):
    found = judge(f"{rewards}.own")
    assert found.outcome == found.total == 2.0
    assert found.scores == {"own": 2.0, "own/turns": 4.0}


def test_a_function_written_for_verl_is_used_as_it_is_and_sees_the_whole_response(rewards):
    found = judge(f"{rewards}.verl")
    assert found.scores == {"verl": 1.0, "verl/acc": 1.0}
    assert judge(f"{rewards}.verl_with_more").outcome == 1.0


def test_coroutine_functions_are_run(rewards):
    assert judge(f"{rewards}.asynchronous").outcome == 1.0
    assert judge(f"{rewards}.own_asynchronous").outcome == 1.0


def test_a_rule_may_ask_for_its_deadline(rewards):
    config = ScoringConfig(rule=f"{rewards}.timed")
    assert load_rules(config).score(replace(rule_input("72"), deadline=5.0)).scores["timed/deadline"] == 5.0


def test_a_function_whose_parameters_do_not_tell_is_refused_until_it_has_a_kind(rewards):
    assert judge(f"{rewards}.verl_rest").outcome == 1.0
    with pytest.raises(ConfigError, match=r"fit several kinds of function.*kind: verl"):
        judge(f"{rewards}.retried")
    assert judge([{"name": f"{rewards}.retried", "kind": "verl"}]).outcome == 1.0
    with pytest.raises(ConfigError, match="cannot judge an episode"):
        judge([{"name": f"{rewards}.verl", "kind": "own"}])


def test_nested_params_of_a_verl_function_are_attributes_too(rewards):
    entry = {"name": f"{rewards}.configured", "params": {"config": {"buffer": {"len": 2}}}}
    assert judge([entry]).outcome == 4.0


def test_two_functions_of_one_name_are_told_apart_by_another(rewards):
    entries = [f"{rewards}.own", {"name": f"{rewards}.own", "as": "own_again", "weight": 0.5}]
    found = judge(entries)
    assert found.total == 3.0
    assert found.scores == {"own": 2.0, "own/turns": 4.0, "own_again": 2.0, "own_again/turns": 4.0}


def test_every_data_source_can_have_its_rules(rewards):
    rules = load_rules(ScoringConfig(rules={"test": f"{rewards}.own", "other": "exact_match"}))
    assert rules.score(rule_input("four")).outcome == 4.0
    assert rules.score(rule_input("72", source="other")).scores == {"exact_match": 1.0}
    assert rules.score(rule_input("so 72", source="third")).scores == {"exact_number": 1.0}


def test_rules_are_added_by_weight_and_the_first_says_whether_the_answer_is_right(rewards):
    rules = [
        {"name": "gsm8k"},
        {"name": "format", "weight": 0.25, "params": {"pattern": "^so"}},
        {"name": f"{rewards}.own_with_options", "weight": -0.5, "params": {"factor": 0.25}},
    ]
    found = judge(rules, "so #### 71")
    assert found.outcome == 0.0
    overruns = {"format/out_of_time": 0.0, "format/out_of_memory": 0.0}
    assert found.scores == {"gsm8k": 0.0, "format": 1.0, "own_with_options": 2.5, **overruns}
    assert found.total == 0.25 - 1.25
    assert judge(rules, "#### 72").outcome == 1.0
    config = ScoringConfig(rules={"test": rules})
    assert rule_names(config, "test") == f"gsm8k,format,{rewards}.own_with_options"
    assert rule_names(config, "other") == "exact_number"


def test_a_bare_name_in_a_list_weighs_one():
    assert judge(["exact_match", {"name": "format", "weight": 0}]).total == 1.0


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("exact_nubmer", "use one of code, environment, .*, or the dotted path"),
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
        ([{"name": "gsm8k", "weight": float("nan")}], "weight of gsm8k is nan; it must be a finite number"),
        (["gsm8k", "gsm8k"], "two rules with the same name.*with `as`"),
        ([{"name": "gsm8k", "as": "a/b"}], "without a slash"),
        ([{"name": "gsm8k", "kind": "verll"}], "use one of own, verl"),
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


@pytest.mark.parametrize("one", [np.bool_(True), np.float32(1.0), np.array([1.0]), torch.tensor(1.0), torch.ones(1, 1)])
def test_what_holds_one_number_is_that_number(one):
    assert read_result(one) == (1.0, {})
    assert read_result({"score": one, "more": one}) == (1.0, {"more": 1.0})


def test_a_further_number_that_is_not_finite_is_left_out_and_counted():
    result = {"score": 1.0, "acc": 1.0, "ppl": float("nan"), "ratio": float("inf"), "large for a float32": -1e39}
    assert read_result(result) == (1.0, {"acc": 1.0, "not_finite": 3.0})


@pytest.mark.parametrize(
    "result",
    [
        *(None, torch.ones(2), "1", float("nan"), float("inf"), 1e39, 10**400, {"acc": 1}, {"score": None}, [1.0]),
        {"score": 1.0, "acc": float("nan")},
    ],
)
def test_a_senseless_result_is_a_failure_and_not_a_zero(result):
    with pytest.raises(ScoringError, match=r"^mine"):
        read_result(result, "mine")
