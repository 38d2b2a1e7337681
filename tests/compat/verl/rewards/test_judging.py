"""The batch that a manager of whole groups gets in a run, and the rewards that its result becomes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.rewards.judging import Judge, as_batch
from asyncrl.errors import ScoringError
from asyncrl.types import Role, Turn, runs_of
from tests.helpers import make_task, make_trajectory
from tests.scoring.whole_groups import group


class Returns:
    """A manager that returns what it was made with, and keeps what it got."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.num_examine = -1
        self.examined: list[int] = []

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        self.data = data
        self.examined.append(self.num_examine)
        data.pop(non_tensor_batch_keys=["trajectory_id"])
        return self.result


def batch(members: int = 2, source: str = "mine") -> DataProto:
    leases = group("t1", ["an answer", "another one that is longer"][:members], source=source)
    return as_batch([each.trajectory for each in leases], [each.task for each in leases], 0, evaluation=False)


def test_a_batch_has_a_row_for_each_member_with_the_fields_of_verls_layout() -> None:
    data = batch()
    assert set(data.batch.keys()) >= {
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
        "rollout_log_probs",
    }
    assert data.non_tensor_batch["uid"].tolist() == ["t1", "t1"]
    assert data.non_tensor_batch["reward_model"][0]["ground_truth"] == "72"
    assert data.non_tensor_batch["extra_info"][1] == {"split": "train"}
    assert data.meta_info == {"validate": False}
    assert data.batch["attention_mask"][0].sum() < data.batch["attention_mask"][1].sum()


def test_an_episode_that_rewrote_its_history_is_the_row_of_its_last_branch() -> None:
    task = make_task()
    turns = [Turn(0, 2, Role.PROMPT), Turn(2, 4, Role.ASSISTANT, "stop")]
    turns += [Turn(4, 5, Role.PROMPT), Turn(5, 8, Role.ASSISTANT, "stop")]
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
    rewritten = make_trajectory(
        turns=tuple(turns),
        steps=(),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_runs=runs_of(np.where(mask, 0, -1).astype(np.int32)),
    )
    plain = make_trajectory(id="t000000001.1.0", member=1)
    data = as_batch([rewritten, plain], [task, task], 0, evaluation=True)
    assert data.non_tensor_batch["member"].tolist() == [0, 1]
    assert data.batch["responses"][0].tolist() == [5, 6, 7, 0]


def test_the_reward_is_the_sum_of_a_row_and_the_outcome_is_acc() -> None:
    rewards = torch.tensor([[0.25, 0.5], [0.0, -1.0]])
    extra = {
        "acc": [True, np.float32(0)],
        "pred": ["72", None],
        "loss": [math.inf, torch.tensor(2.0)],
        "reason": ["good", 3],
    }
    scores = Judge(Returns({"reward_tensor": rewards, "reward_extra_info": extra}), 0).scores(batch(), 0)
    assert scores == [
        (0.75, 1.0, {"acc": 1.0, "not_finite": 1.0}, "72", "good"),
        (-1.0, 0.0, {"acc": 0.0, "loss": 2.0, "reason": 3.0}, "", ""),
    ]
    assert Judge(Returns(rewards), 0).scores(batch(), 0)[1] == (-1.0, -1.0, {}, "", "")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "returned NoneType without `reward_tensor`"),
        ({"rewards": 1}, "returned dict without `reward_tensor`"),
        (
            {"reward_tensor": torch.zeros(2, 4), "reward_extra_info": {"acc": [1.0, math.nan]}},
            r"gave row 1 \(t1\.1\.0\) the acc nan",
        ),
        (torch.zeros(2, 0), r"returned rewards \[2, 0\] for 2 rows"),
        (torch.zeros(3, 4), r"returned rewards \[3, 4\] for 2 rows"),
        ({"reward_tensor": torch.zeros(2, 4), "reward_extra_info": {"a": [1]}}, "1 values of a for 2 rows"),
        (torch.tensor([[0.0], [math.nan]]), r"gave row 1 \(t1\.1\.0\) the reward nan"),
        (torch.tensor([[1e39], [0.0]], dtype=torch.float64), r"gave row 0 \(t1\.0\.0\) the reward 1e\+39"),
    ],
)
def test_what_is_no_reward_for_each_row_is_refused(result: Any, reason: str) -> None:
    with pytest.raises(ScoringError, match=reason):
        Judge(Returns(result), 0).scores(batch(), 0)


def test_each_row_keeps_its_own_reward_however_the_manager_sorts_its_batch() -> None:
    class Sorting(Returns):
        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            data.reorder(torch.tensor([1, 0]))
            return torch.tensor(data.non_tensor_batch["member"].astype(float)).repeat(3, 1).T

    class Cutting(Returns):
        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            data.non_tensor_batch = {name: each[:1] for name, each in data.non_tensor_batch.items()}
            return torch.zeros(2, 3)

    assert [score[0] for score in Judge(Sorting(None), 0).scores(batch(), 0)] == [0.0, 3.0]
    with pytest.raises(ScoringError, match=r"changed the rows .*t1\.0\.0"):
        Judge(Cutting(None), 0).scores(batch(), 0)


def test_a_manager_prints_once_for_each_version_and_data_source() -> None:
    manager = Returns(torch.zeros(2, 1))
    judge = Judge(manager, 3)
    for source, version in (("a", 0), ("a", 0), ("b", 0), ("a", 1), ("b", 0), ("a", 0)):
        judge.scores(batch(source=source), version)
    assert manager.examined == [3, 0, 3, 3, 0, 0]
