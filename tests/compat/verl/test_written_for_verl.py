"""Files written for verl, which begin with `import verl`, run as they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from asyncrl.compat.verl import DataProto, load_reward_manager, provide_verl
from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.rules.registry import load_rules
from tests.compat.verl.operations import CharTokenizer
from tests.scoring.fakes import CharTokenizer as EpisodeTokenizer
from tests.scoring.fakes import rule_input

MANAGER = "tests.data.verl.group_manager.SharedRewardManager"


@pytest.fixture(autouse=True)
def _without_verl() -> Iterator[None]:
    """Nothing of these tests is left in the process."""

    def forget() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "verl" or name == "tests.data.verl.group_manager":
                del sys.modules[name]

    forget()
    yield
    forget()


def test_a_manager_gets_whole_groups_of_a_batch() -> None:
    letters = [[52, 50, 0, 0], [52, 50, 33, 33], [55, 0, 0, 0], [52, 50, 0, 0]]
    responses = torch.tensor(letters)
    data = DataProto.from_dict(
        {
            "prompts": torch.tensor([[63]] * 4),
            "responses": responses,
            "attention_mask": torch.cat([torch.ones(4, 1), responses != 0], dim=1).long(),
        },
        {
            "uid": np.array(["a", "a", "a", "b"], object),
            "reward_model": np.array([{"ground_truth": "42"}] * 4, object),
        },
    )
    manager = load_reward_manager(MANAGER, CharTokenizer(), 0, points=3.0)
    result = manager(data, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [2, 1, 0, 3]
    assert result["reward_extra_info"]["right"] == [1, 1, 0, 1]


def test_a_manager_that_imports_verl_is_the_rule_of_a_run() -> None:
    rule = {"name": "asyncrl.compat.verl.VerlManager", "as": "shared", "params": {"name": MANAGER, "points": 2.0}}
    rules = load_rules(ScoringConfig(rules={"test": [rule]}), EpisodeTokenizer)
    assert rules.score(rule_input("it is 72")).outcome == 2.0
    assert rules.score(rule_input("it is 71")).outcome == 0.0


def test_names_that_are_not_provided_cannot_be_imported() -> None:
    assert provide_verl()
    assert provide_verl()
    assert importlib.import_module("verl.protocol").DataProto is DataProto
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.trainer'"):
        importlib.import_module("verl.trainer.main_ppo")


def test_an_installed_verl_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(sys)("verl")
    monkeypatch.setitem(sys.modules, "verl", other)
    assert not provide_verl()
    assert sys.modules["verl"] is other
