"""Reward managers with verl's constructor and call; test_against_verl compares them with verl's own."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import pytest
import torch

from asyncrl.compat.verl import (
    BatchRewardManager,
    DAPORewardManager,
    DataProto,
    NaiveRewardManager,
    PrimeRewardManager,
    load_reward_manager,
)
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError, DataProtoError, ScoringError
from asyncrl.scoring.rules.registry import load_rules
from tests.compat.verl.operations import CharTokenizer, judged, score_all, score_mapping, score_number
from tests.helpers import GENEROUS_S
from tests.scoring.fakes import CharTokenizer as EpisodeTokenizer
from tests.scoring.fakes import rule_input

ROWS = [
    ["question", "xx", "x", "a", 0.5],
    ["q", "yyyyy", "x", "a", 1.0],
]
TOKENIZER = CharTokenizer()


def judge(manager: Any, rows: Any = ROWS) -> Any:
    return judged(DataProto, manager, {"rows": rows})


def sleepy(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Hangs for answers of y."""
    if "y" in solution_str:
        time.sleep(600)
    return 1.0


def broken(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    raise KeyError("answer")


def deadly(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    os._exit(3)


class BestOfGroup:
    """A manager of a user's own: of each group, the longest response earns 1."""

    def __init__(self, tokenizer: Any, num_examine: int, bonus: Any = None) -> None:
        self.bonus = bonus.size if bonus else 1.0

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(-1)
        rewards = data.batch["responses"].float().zero_()
        rewards[lengths.argmax(), lengths.max() - 1] = self.bonus
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


def test_a_score_is_on_the_last_token_of_its_response() -> None:
    # Each response ends with a special token, and the longest is followed by one of padding.
    assert judge(NaiveRewardManager(TOKENIZER, 0, score_number))["rewards"] == [
        [0, 0, 2.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 5, 0],
    ]


def test_further_values_of_a_score_are_lists_by_name() -> None:
    extra = judge(NaiveRewardManager(TOKENIZER, 0, score_mapping))["extra"]
    assert extra == {"score": [0, 0], "pred": ["xx", "yyyyy"], "turns": [2, 2], "tool": [0.5, 1]}


def test_scores_with_different_names_stay_in_line() -> None:
    def uneven(solution_str: str, **_: Any) -> Any:
        return {"score": 1.0, "x": True} if "x" in solution_str else 0.5

    assert judge(NaiveRewardManager(TOKENIZER, 0, uneven))["extra"] == {"score": [1, None], "x": [1, None]}


def test_batch_sees_all_rows_at_once_and_keeps_its_rewards() -> None:
    result = judge(BatchRewardManager(TOKENIZER, 0, score_all, scale=0.5))
    assert result["acc"] == [-1.5, 0]
    with pytest.raises(ScoringError, match="1 scores for 2 rows"):
        judge(BatchRewardManager(TOKENIZER, 0, lambda **_: [1.0]))


def test_dapo_takes_from_long_responses() -> None:
    # Lengths 3 and 6: with 4 free tokens and a buffer of 4, the second is 2 over, half of the penalty.
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
    result = judge(DAPORewardManager(TOKENIZER, 0, score_number, max_resp_len=8, overlong_buffer_cfg=buffer))
    assert [max(row, key=abs) for row in result["rewards"]] == [2.5, 4.5]
    assert result["extra"] == {"acc": [2.5, 5], "overlong_reward": [0, -0.5], "overlong": [0, 1]}


@pytest.mark.parametrize(
    ("length", "size", "problem"), [(None, 4, "set max_resp_len"), (3, 4, "from 1 to"), (8, 0, "from 1 to")]
)
def test_dapos_lengths_must_fit(length: int | None, size: int, problem: str) -> None:
    with pytest.raises(DataProtoError, match=problem):
        DAPORewardManager(TOKENIZER, 0, max_resp_len=length, overlong_buffer_cfg={"enable": True, "len": size})


@pytest.mark.slow
def test_prime_scores_in_several_processes() -> None:
    result = judge(PrimeRewardManager(TOKENIZER, 0, score_number, num_processes=2))
    assert (result["acc"], result["extra"]) == ([2.5, 5], {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (sleepy, "took longer than 3 s for row 1"),
        (broken, r"failed for row \d: KeyError"),
        (deadly, r"ended its process for row \d"),
    ],
)
def test_a_row_that_fails_is_named_and_never_scored_zero(score: Any, problem: str) -> None:
    limit_s = 3 if score is sleepy else GENEROUS_S
    for manager in (
        PrimeRewardManager(TOKENIZER, 0, score, timeout_s=limit_s),
        NaiveRewardManager(TOKENIZER, 0, score, compute_score_timeout=limit_s),
    ):
        with pytest.raises(ScoringError, match=problem):
            judge(manager)


def quits(*arguments: Any, **named: Any) -> float:
    sys.exit("no more")


@pytest.mark.slow
@pytest.mark.parametrize("manager", [NaiveRewardManager, BatchRewardManager, DAPORewardManager, PrimeRewardManager])
def test_a_function_that_ends_the_program_is_a_failure_of_its_row(manager: Any) -> None:
    with pytest.raises(ScoringError, match=r"failed for (row 0|a batch of 2 rows): it tried|ended its process"):
        judge(manager(TOKENIZER, 0, quits))


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e39])
@pytest.mark.parametrize("manager", [NaiveRewardManager, BatchRewardManager, DAPORewardManager])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_row(manager: Any, reward: float) -> None:
    def score(**given: Any) -> Any:
        return [1.0, reward] if "solution_strs" in given else reward if "y" in given["solution_str"] else 1.0

    with pytest.raises(ScoringError, match="the reward of row 1 is"):
        judge(manager(TOKENIZER, 0, score))


def test_a_function_without_a_name_cannot_be_called_elsewhere() -> None:
    with pytest.raises(ScoringError, match="cannot be sent to another process"):
        judge(PrimeRewardManager(TOKENIZER, 0, lambda *_: 1.0))


def test_some_rows_of_each_source_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    judge(NaiveRewardManager(TOKENIZER, 1, score_number), [*ROWS, ["q", "z", "x", "b", 0.0]])
    samples = [record.getMessage() for record in caplog.records]
    assert [sample.splitlines()[1] for sample in samples] == ["[response] xx", "[response] z"]
    assert samples[0].splitlines()[0] == "[prompt] question"


def test_rewards_that_are_there_are_returned() -> None:
    data = DataProto.from_dict({"rm_scores": torch.ones(2, 3)}, {"seen": [1, 2]}, {"reward_extra_keys": ["seen"]})
    result = NaiveRewardManager(TOKENIZER, 0)(data, return_dict=True)
    assert result["reward_tensor"] is data.batch["rm_scores"]
    assert result["reward_extra_info"]["seen"].tolist() == [1, 2]


def test_without_a_function_gsm8k_is_scored_by_its_rule() -> None:
    rows = [["q", "so\n#### 72", "72", "openai/gsm8k", 0.0], ["q", "#### 71", "72", "openai/gsm8k", 0.0]]
    assert [sum(row) for row in judge(NaiveRewardManager(TOKENIZER, 0), rows)["rewards"]] == [1, 0]
    with pytest.raises(NotImplementedError, match="no default score for the data source 'a'"):
        judge(NaiveRewardManager(TOKENIZER, 0))


def test_a_manager_of_your_own_gets_the_whole_batch() -> None:
    manager = load_reward_manager(f"{__name__}.BestOfGroup", TOKENIZER, 0, bonus={"size": 2.0})
    assert [sum(row) for row in judge(manager)["rewards"]] == [0, 2]


def test_managers_and_their_functions_are_named_by_dotted_paths() -> None:
    manager = load_reward_manager("batch", TOKENIZER, 0, f"{score_all.__module__}.score_all", scale=2.0)
    assert judge(manager)["acc"] == [-6, 0]
    with pytest.raises(ConfigError, match=r"reward_manager=no\.such cannot be imported"):
        load_reward_manager("no.such", TOKENIZER, 0)


def test_a_run_may_name_one_as_its_rule() -> None:
    rule = {
        "name": "asyncrl.compat.verl.NaiveRewardManager",
        "params": {"compute_score": f"{score_number.__module__}.score_number"},
    }
    rules = load_rules(ScoringConfig(rules={"test": [rule]}), EpisodeTokenizer)
    given = rule_input("it is 72")
    assert rules.score(given).outcome == len(given.response) + 0.5
