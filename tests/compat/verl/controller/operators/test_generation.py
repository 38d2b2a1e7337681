"""Prompts and their tasks before and after a batch is divided among workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.controller.operators.generation import MEMBER, PromptSampling, generating, tickets_of
from asyncrl.compat.verl.controller.operators.prompts import task_of


@pytest.mark.parametrize("given", [(), (MEMBER,)])
def test_prompts_without_an_id_or_index_have_their_own_tasks_on_every_worker(given: tuple[str, ...]) -> None:
    answers = ["2", "3", "4", "5"]
    prompts = DataProto.from_dict(
        non_tensors={
            "uid": np.array(["a", "a", "b", "b"], object),
            "data_source": np.array(["sums"] * 4, object),
            "raw_prompt": np.array([{"role": "user", "content": "?"}] * 4, object).reshape(4, 1),
            "reward_model": np.array([{"ground_truth": answer} for answer in answers], object),
            **{name: np.array([0, 1, 0, 1], object) for name in given},
        }
    )
    ((*parts,),), _ = generating()["dispatch_fn"](SimpleNamespace(world_size=2), prompts)
    tickets = [ticket for part in parts for ticket in tickets_of(part, PromptSampling(1.0, False), 0)]
    tasks = {ticket.task.id: ticket.task.ground_truth for ticket in tickets}
    assert [tasks[ticket.task.id] for ticket in tickets] == answers
    assert [ticket.member for ticket in tickets] == [0, 1, 0, 1]


def test_rows_whose_index_or_split_is_null_have_ids_of_their_own() -> None:
    row = {
        "data_source": "sums",
        "raw_prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": "2"},
    }
    extras: list[Any] = [{"index": None, "split": None}, {}, None, {"index": 1}, {"index": 7, "split": "test"}]
    ids = [task_of({**row, "extra_info": extra}, number).id for number, extra in enumerate(extras)]
    assert ids == ["sums/train/row-0", "sums/train/row-1", "sums/train/row-2", "sums/train/1", "sums/test/7"]
