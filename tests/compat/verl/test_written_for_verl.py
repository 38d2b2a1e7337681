"""Files written for verl, which begin with `import verl`, run as they are."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.chat.chat import Chat
from asyncrl.compat.verl import DataProto, load_reward_manager, provide_verl
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.tools.interactions.registry import load_interactions
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.types import Finish
from tests.compat.verl.operations import CharTokenizer
from tests.episode.fakes import ScriptedEngine, make_ticket, make_tokenizer, play_with_tools
from tests.scoring.fakes import CharTokenizer as EpisodeTokenizer
from tests.scoring.fakes import rule_input

WRITTEN_FOR_VERL = ("tests.data.verl.group_manager", "tests.data.verl.quiz_interaction")
MANAGER = f"{WRITTEN_FOR_VERL[0]}.SharedRewardManager"
QUIZ = f"{WRITTEN_FOR_VERL[1]}.QuizInteraction"


@pytest.fixture(autouse=True)
def _without_verl() -> Iterator[None]:
    """Remove the modules of these tests from the process, before and after each test."""

    def forget() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "verl" or name in WRITTEN_FOR_VERL:
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


def quiz_users(**config: Any) -> Interactions:
    entry = {"class_name": "asyncrl.compat.verl.VerlInteraction", "config": {"class_name": QUIZ, **config}}
    return Interactions(load_interactions({"quiz": entry}), InteractionLimits())


def test_an_interaction_that_imports_verl_is_the_user_of_an_episode_and_forgets_it_afterwards() -> None:
    users, tokenizer = quiz_users(max_hints=2), make_tokenizer()
    kwargs = {"name": "quiz", "ground_truth": "42", "hints": ["it is even", "it is large"]}
    ticket = make_ticket(extra_info={"interaction_kwargs": kwargs})
    engine = ScriptedEngine(tokenizer, ["41", "#### 40", "#### 42", "never"])
    trajectory = asyncio.run(play_with_tools(engine, Chat(tokenizer), {}, ticket, interactions=users))
    assert trajectory.turn_scores == [0.0, 0.25, 1.0]
    assert trajectory.finish is Finish.COMPLETED
    assert "Wrong. A hint: it is large" in tokenizer.decode(trajectory.tokens.tolist())
    assert users._users["quiz"]._theirs._instances == {}  # type: ignore[attr-defined]
    assert kwargs["hints"] == ["it is even", "it is large"]


class Silent:
    """An interaction whose `finalize_interaction` takes no id, as in verl's own base class."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return True, self.config["name"], None, {}

    async def finalize_interaction(self) -> None:
        raise AssertionError("it takes no id")


def test_an_interaction_whose_finalize_takes_no_id_is_not_finalized_and_none_is_no_score() -> None:
    entry = {"class_name": "asyncrl.compat.verl.VerlInteraction", "config": {"class_name": f"{__name__}.Silent"}}
    users, tokenizer = Interactions(load_interactions({"silent": entry}), InteractionLimits()), make_tokenizer()
    ticket = make_ticket(extra_info={"interaction_kwargs": {"name": "silent"}})
    played = play_with_tools(ScriptedEngine(tokenizer, ["4"]), Chat(tokenizer), {}, ticket, interactions=users)
    assert asyncio.run(played).turn_scores == []
    assert users.counts.failures == 0


@pytest.mark.parametrize("path", ["tests.nowhere.Quiz", "collections.OrderedDict", "math.sqrt"])
def test_a_class_that_is_no_interaction_of_verl_is_refused(path: str) -> None:
    entry = {"class_name": "asyncrl.compat.verl.VerlInteraction", "config": {"class_name": path}}
    with pytest.raises(ConfigError, match=rf"actor\.interactions: quiz: config\.class_name={path} "):
        load_interactions({"quiz": entry})


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
