"""Rules, reward managers and models of users may change all that they are given: nothing else is scored otherwise."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.compat.verl.rewards.judging import as_batch
from asyncrl.config.schema import ScoringConfig, ScoringModelConfig
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.models.registry import load_prm
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.types import Task, ToolCall, Trajectory
from tests.helpers import make_task
from tests.scoring.fakes import lease, lines, make_scorer, rule_input

TOOLS = {"find": {"a": [1]}}
EXTRA = {"words": ["a", {"b": [1]}], "tools_kwargs": TOOLS}
PARAMS = {"words": ["x", {"y": [2]}]}
CALL = ToolCall("find", {"filters": {"years": [1990]}})


def ruin(value: Any) -> None:
    """Change all of it."""
    if isinstance(value, dict):
        for inner in value.values():
            ruin(inner)
        value.clear()
        value["live"] = object()
    if isinstance(value, list):
        for inner in value:
            ruin(inner)
        value[:] = [object()]


def own(task: Task, answer: str, trajectory: Trajectory, words: Any = ()) -> float:
    found = _right(task, trajectory) and list(words) == ["x", {"y": [2]}]
    ruin([task.messages, task.extra_info, task.tools_kwargs, trajectory.rewards, trajectory.timings, words])
    for turn in trajectory.turns:
        for call in turn.tool_calls:
            ruin(call.arguments)
    return float(found)


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, words: Any = ()) -> float:
    found = extra_info["words"] == EXTRA["words"] and list(words) == ["x", {"y": [2]}]
    ruin([extra_info, words])
    return float(found)


class Manager:
    def __init__(self, tokenizer: Any, num_examine: int) -> None:
        pass

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        row = data[0].non_tensor_batch
        found = row["extra_info"]["words"] == EXTRA["words"]
        ruin([row["extra_info"], row["raw_prompt"], row["reward_model"]])
        return torch.full((1, 1), float(found))


def _right(task: Task, trajectory: Trajectory) -> bool:
    calls = [call for turn in trajectory.turns for call in turn.tool_calls]
    return task.extra_info == EXTRA and calls == [CALL] and trajectory.rewards == {"tool": 1.0}


def _given() -> RuleInput:
    given = rule_input("72")
    turns = tuple(each._replace(tool_calls=(CALL,) if each.tool_calls else ()) for each in given.trajectory.turns)
    trajectory = msgspec.structs.replace(given.trajectory, turns=turns, rewards={"tool": 1.0})
    task = make_task(extra_info=copy.deepcopy(EXTRA))
    return RuleInput(task, trajectory, given.answer, given.response)


def test_each_rule_gets_an_episode_and_params_of_its_own() -> None:
    entries: Any = [
        {"name": f"{__name__}.{name}", "as": f"{name}{number}", "params": {} if name == "Manager" else PARAMS}
        for number in range(2)
        for name in ("own", "verl", "Manager")
    ]
    rules = load_rules(ScoringConfig(rule=copy.deepcopy(entries)), lambda: None)
    for _ in range(2):
        found = rules.score(_given())
        assert dict(found.scores) == dict.fromkeys([str(each["as"]) for each in entries], 1.0)


def test_a_group_in_verls_layout_has_values_of_its_own_in_each_row() -> None:
    task, trajectory = _given().task, _given().trajectory
    batch = as_batch([trajectory, msgspec.structs.replace(trajectory, id="another")], [task, task], 0, evaluation=False)
    row = batch.non_tensor_batch
    ruin([row["extra_info"][0], row["raw_prompt"][0], row["tools_kwargs"][0]])
    assert row["extra_info"][1]["words"] == EXTRA["words"]
    assert task.extra_info == EXTRA
    assert task.tools_kwargs == TOOLS


class HostileModel:
    name = "hostile"

    def __init__(self, config: ScoringModelConfig) -> None:
        ruin(config.params)

    def score(self, transcripts: Any) -> list[StepScores]:
        steps = [sum(passage.is_step for passage in each) for each in transcripts]
        ruin(transcripts)
        return [StepScores.of_probabilities(np.full(count, 0.5)) for count in steps]


def test_a_model_may_change_the_transcripts_and_its_configuration() -> None:
    config = ScoringModelConfig(family=f"{__name__}.HostileModel", params={"a": [1]})
    model = load_prm(config)
    assert config.params == {"a": [1]}
    scorer = make_scorer(prm=model)
    [found] = scorer.score([lease(lines("one", "two"), "prm")])
    assert found.step_scores.tolist() == [0.5, 0.5]  # type: ignore[union-attr]
