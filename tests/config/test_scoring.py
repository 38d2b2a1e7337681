from asyncrl.config.schema import OutcomeModelConfig, ScoringConfig, ScoringModelConfig
from asyncrl.config.schema.scoring import needs, serves


def test_a_source_needs_all_that_is_configured_unless_it_says_otherwise():
    assert needs(ScoringConfig(), "any") == ("rules",)
    outcome_model, needed = OutcomeModelConfig(path="b"), {"chat": ["prm", "outcome_model"]}
    config = ScoringConfig(prm=ScoringModelConfig(path="a"), outcome_model=outcome_model, needs=needed)
    assert needs(config, "any") == ("rules", "outcome_model", "prm")
    assert needs(config, "chat") == ("outcome_model", "prm"), "in the pool's order, however they are written"


def test_a_class_of_the_users_own_is_a_model_without_a_path():
    assert needs(ScoringConfig(prm=ScoringModelConfig(family="my_models.MyPRM")), "any") == ("rules", "prm")


def test_a_process_serves_all_unless_it_says_otherwise():
    config = ScoringConfig(prm=ScoringModelConfig(path="a"))
    assert serves(config) == ("rules", "prm")
    config.serve = ["prm"]
    assert serves(config) == ("prm",)
