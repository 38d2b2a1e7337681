"""The values that may change when a run resumes, and those that a step has."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from asyncrl.config.changes import ConfigChange, ConfigHistory, by_key, changed_keys, recorded, values_of
from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.errors import ConfigError


def values(**changes: object) -> dict[str, object]:
    return values_of(TrainConfig()) | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__path": "other"}, "checkpoints and stored log-probs"),
        ({"algorithm__advantage__name": "gae"}, "may need other models"),
        ({"scoring__prm__path": "prm"}, "kinds of scores that the run began with"),
        ({"scoring__steps": "my.steps"}, "scoring.steps=my.steps.*kinds of scores that the run began with"),
        ({"learner__publish_every": 2}, "versions count"),
        ({"model__freeze": ["embeddings"]}, "optimizer moments of the trained parameters only"),
        ({"model__lora__rank": 8}, "the checkpoints hold only these adapters"),
    ],
)
def test_a_run_that_resumes_keeps_what_its_records_rest_on(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        changed_keys(values(), values(**changes))


RULE, NO_RULE, MODEL = {"scoring__rule": "f"}, {"scoring__rule": None}, {"scoring__outcome_model__path": "model"}
KINDS_CHANGE = [
    (RULE | MODEL, MODEL | NO_RULE, "scoring.rule=null"),
    (RULE | MODEL, RULE | MODEL | {"scoring__rules": {"src": None}}, "scoring.rules={src: null}"),
    (NO_RULE | MODEL | {"scoring__rules": {"src": "f"}}, NO_RULE | MODEL, "scoring.rules={}"),
    (RULE, NO_RULE | {"scoring__rules": {"src": "f"}}, "scoring.rule=null"),
    ({"scoring__prm__family": "my.PRM"}, {}, "scoring.prm.family=value_head"),
    ({}, {"scoring__outcome_model__family": "my.Model"}, "scoring.outcome_model.family=my.Model"),
]


@pytest.mark.parametrize(("began", "now", "refused"), KINDS_CHANGE)
def test_each_data_source_keeps_the_kinds_of_scores_for_which_stored_episodes_wait(
    began: dict[str, object], now: dict[str, object], refused: str
) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(refused)}: it was .*kinds of scores that the run began with"):
        changed_keys(values(**began), values(**now))


def test_a_rule_or_model_may_be_replaced_by_another_one() -> None:
    began = values(scoring__rule="f", scoring__rules={"a": "f"}, scoring__prm__family="my.PRM")
    now = values(scoring__rule="g", scoring__rules={"b": "g"}, scoring__prm__family="my.Other")
    assert changed_keys(began, now) == ["scoring.rule", "scoring.rules", "scoring.prm.family"]


def test_a_name_of_a_column_is_no_secret_so_a_resumed_run_keeps_it():
    began, now = ({"prompt_key": each} for each in ("question", "problem"))
    before = recorded(values(data__dataset_params=began))
    with pytest.raises(ConfigError, match=r"prompt_key: problem.*it was .*prompt_key: question"):
        changed_keys(before, values(data__dataset_params=now))


def test_hyperparameters_of_a_step_may_change_and_addresses_are_no_change() -> None:
    changes = {"learner__lr": 1.0, "algorithm__loss__params": {"clip": 0.3}, "algorithm__kl__name": "k3"}
    assert changed_keys(values(), values(**changes, network__replay_port=1)) == [
        "learner.lr",
        "algorithm.loss.params",
        "algorithm.kl.name",
    ]
    swapped = values(scoring__prm__path="another")
    assert changed_keys(values(scoring__prm__path="prm"), swapped) == ["scoring.prm.path"]
    assert by_key({"learner": {"lr": 1.0}}) == values(learner__lr=1.0), "a key that is not there has its default"


def test_a_step_has_the_newest_value_that_was_recorded_for_it() -> None:
    config = TrainConfig()
    corrections = [PartConfig("veto"), PartConfig("truncate", {"cap": 3.0})]
    config.learner.lr, config.algorithm.correction = 0.3, corrections
    plain = values_of(config)["algorithm.correction"]
    changes = [
        ConfigChange(3, "learner.lr", 0.1, 0.2, 0),
        ConfigChange(3, "algorithm.correction", [], plain, 0),
        ConfigChange(3, "actor.concurrency", 1, 2, 0),
        ConfigChange(5, "learner.lr", 0.2, 0.3, 0),
    ]
    history = ConfigHistory(config, changes)
    assert [history.at(step).learner.lr for step in range(7)] == [0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    assert history.at(2).algorithm.correction == []
    assert history.at(3).algorithm.correction == corrections
    other = replace(config, learner=replace(config.learner, lr=7.0))
    assert {ConfigHistory(other, changes).at(step).learner.lr for step in range(7)} == {7.0}
