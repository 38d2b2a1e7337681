import pytest

from asyncrl.config.schema import ManagerConfig, OutcomeModelConfig, ScoringConfig, ScoringModelConfig, ShapingConfig
from asyncrl.config.schema.scoring import may_give, needs, serves


def test_a_source_needs_all_that_is_configured_unless_it_says_otherwise():
    assert needs(ScoringConfig(), "any") == ("rules",)
    outcome_model, needed = OutcomeModelConfig(path="b"), {"chat": ["prm", "outcome_model"]}
    config = ScoringConfig(prm=ScoringModelConfig(path="a"), outcome_model=outcome_model, needs=needed)
    assert needs(config, "any") == ("rules", "outcome_model", "prm")
    assert needs(config, "chat") == ("outcome_model", "prm"), "in the pool's order, however they are written"


def test_a_null_rule_leaves_the_scores_to_the_others():
    config = ScoringConfig(rule=None, outcome_model=OutcomeModelConfig(path="b"), rules={"sums": "gsm8k"})
    assert [needs(config, each) for each in ("any", "sums")] == [("outcome_model",), ("rules", "outcome_model")]
    assert may_give(config, "accuracy")
    config.rules = {}
    assert serves(config) == ("outcome_model",)
    assert not may_give(config, "accuracy")
    assert not may_give(config, "rules")


def test_a_class_of_the_users_own_is_a_model_without_a_path():
    assert needs(ScoringConfig(prm=ScoringModelConfig(family="my_models.MyPRM")), "any") == ("rules", "prm")


def test_a_process_serves_all_unless_it_says_otherwise():
    config = ScoringConfig(prm=ScoringModelConfig(path="a"))
    assert serves(config) == ("rules", "prm")
    config.serve = ["prm"]
    assert serves(config) == ("prm",)


def test_a_manager_takes_the_place_of_the_rules_and_comes_last():
    config = ScoringConfig(manager=ManagerConfig(name="naive"), prm=ScoringModelConfig(path="a"))
    assert needs(config, "any") == ("prm", "manager")
    config.needs = {"both": ["manager", "rules"]}
    assert needs(config, "both") == ("rules", "manager")


def test_data_sources_have_managers_of_their_own_or_none():
    sources = {"own": {"name": "dapo", "num_examine": 3}, "none": None}
    config = ScoringConfig(manager=ManagerConfig(name="naive", params={"a": 1}, sources=sources))
    assert [needs(config, each) for each in ("any", "own", "none")] == [("manager",), ("manager",), ("rules",)]
    own = config.manager.of("own")
    common = {"compute_score": None, "compute_score_params": {}, "val_num_examine": 1, "params": {"a": 1}}
    assert own == {"name": "dapo", "num_examine": 3, **common}
    assert config.manager.of("none") is None
    only = ScoringConfig(manager=ManagerConfig(sources={"own": {"name": "dapo"}}))
    assert [needs(only, each) for each in ("any", "own")] == [("rules",), ("manager",)]


MODEL = ScoringModelConfig(path="a")
PER_STEP = ShapingConfig(prm_aggregation="per_step")


@pytest.mark.parametrize(
    ("config", "given", "never"),
    [
        (
            ScoringConfig(),
            ["rules", "accuracy", "environment", "rule/exact_number"],
            ["process", "manager", "overlong"],
        ),
        (ScoringConfig(rule="a.b.score"), ["rule/score", "rule/score/style"], ["rule/b", "rule/exact_number", "score"]),
        (ScoringConfig(rules={"s": ["math", {"name": "a.f", "as": "g"}]}), ["rule/math", "rule/g/x"], ["rule/f"]),
        (ScoringConfig(manager=ManagerConfig(name="naive")), ["manager", "manager/acc"], ["shadow/process"]),
        (ScoringConfig(prm=MODEL), ["process"], ["outcome_model", "shadow/process"]),
        (ScoringConfig(prm=MODEL, shadow=True), ["shadow/process"], ["process"]),
        (ScoringConfig(prm=MODEL, shaping=PER_STEP), ["rules"], ["process"]),
        (ScoringConfig(shaping=ShapingConfig(overlong_penalty=1.0, overlong_max_length=9)), ["overlong"], []),
        (ScoringConfig(rules={"malformed": [None, 3]}), ["rule/exact_number"], ["rule/f"]),
    ],
)
def test_only_scores_that_something_gives_are_known(config: ScoringConfig, given: list[str], never: list[str]) -> None:
    assert [name for name in given if not may_give(config, name)] == []
    assert [name for name in never if may_give(config, name)] == []
