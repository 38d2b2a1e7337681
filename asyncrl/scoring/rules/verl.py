"""What was written for verl, used as it is: reward functions and reward managers.

A function is `compute_score(data_source, solution_str, ground_truth, extra_info)`; `solution_str` is the text of the
whole response as verl has it: all that follows the prompt, tool results included, without special tokens. A manager is
a class that is made with a tokenizer and called with a batch; it gets batches of one episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.base import Case, Judge
from asyncrl.scoring.transcript import response_start
from asyncrl.types import Task


def function_judge(compute_score: Callable[..., Any]) -> Judge:
    """A judge that asks `compute_score`. What it returns besides numbers, such as the parsed text, is left out."""

    def judge(case: Case) -> Any:
        return _numbers(
            compute_score(
                data_source=case.task.data_source,
                solution_str=case.response,
                ground_truth=case.task.ground_truth,
                extra_info=dict(case.task.extra_info),
            )
        )

    return judge


def manager_judge(manager: Callable[..., Any]) -> Judge:
    """A judge that asks a reward manager: the score is the sum of its reward tensor, the rest its extra numbers.

    Raises ScoringError: the manager returned something else.
    """

    def judge(case: Case) -> Any:
        result = manager(Batch.of(case), return_dict=True)
        if not isinstance(result, Mapping) or "reward_tensor" not in result:
            raise ScoringError(f"the reward manager returned {type(result).__name__} without `reward_tensor`")
        extra = {name: values[0] for name, values in result.get("reward_extra_info", {}).items() if len(values)}
        return _numbers({**extra, "score": float(result["reward_tensor"].sum())})

    return judge


@dataclass(frozen=True)
class Item:
    """One row of a batch, as a manager reads it."""

    batch: Mapping[str, Any]
    non_tensor_batch: Mapping[str, Any]
    meta_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """A batch of one episode under the names of verl's DataProto.

    `batch` has prompts int64[1, P], responses int64[1, R], attention_mask int64[1, P + R], response_mask int64[1, R] (1
    on the policy's own tokens) and input_ids int64[1, P + R]; `non_tensor_batch` arrays of one object each.
    """

    batch: Mapping[str, Any]
    non_tensor_batch: Mapping[str, Any]
    meta_info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Batch:
        import torch

        trajectory, start = case.trajectory, response_start(case.trajectory)
        tokens = torch.tensor(trajectory.tokens[None], dtype=torch.int64)
        mask = torch.tensor(trajectory.loss_mask[None], dtype=torch.int64)
        tensors = {
            "prompts": tokens[:, :start],
            "responses": tokens[:, start:],
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "response_mask": mask[:, start:],
        }
        return cls(tensors, {name: _objects(value) for name, value in _row(case.task).items()})

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Item:
        if index not in (0, -1):
            raise IndexError(index)
        rows = {name: tensor[index] for name, tensor in self.batch.items()}
        return Item(rows, {name: values[index] for name, values in self.non_tensor_batch.items()}, self.meta_info)

    def __iter__(self) -> Iterator[Item]:
        yield self[0]


def _row(task: Task) -> dict[str, Any]:
    return {
        "data_source": task.data_source,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": dict(task.extra_info),
        "raw_prompt": [dict(message) for message in task.messages],
    }


def _objects(value: Any) -> np.ndarray[Any, Any]:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def _numbers(result: Any) -> Any:
    if not isinstance(result, Mapping):
        return result
    return {name: value for name, value in result.items() if name == "score" or isinstance(value, Real)}
