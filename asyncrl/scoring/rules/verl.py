"""What was written for verl, used as it is: reward functions and reward managers.

A function is `compute_score(data_source, solution_str, ground_truth, extra_info)`; `solution_str` is the text of the
whole response as verl has it: all that follows the prompt, tool results included, without special tokens. A manager is
a class that is made with a tokenizer and called with a batch; it gets batches of one episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Real
from typing import Any

import numpy as np

from asyncrl.errors import ScoringError
from asyncrl.scoring.answers import prompt_and_response
from asyncrl.scoring.rules.base import Case, Judge, completed, plain
from asyncrl.types import Trajectory


def function_judge(compute_score: Callable[..., Any]) -> Judge:
    """A judge that asks `compute_score`, which may be a coroutine function. What it returns besides numbers, such as
    the parsed text, is left out."""

    def judge(case: Case) -> Any:
        more = {"num_turns": num_turns(case.trajectory), "rollout_reward_scores": {}}
        result = compute_score(
            data_source=case.task.data_source,
            solution_str=case.response,
            ground_truth=case.task.ground_truth,
            extra_info={**case.task.extra_info, **more},
        )
        return _numbers(completed(result))

    return judge


def manager_judge(manager: Callable[..., Any]) -> Judge:
    """A judge that asks a reward manager: the score is the sum of its reward tensor, the rest its extra numbers. One
    whose call takes no `return_dict` returns the tensor alone.

    Raises ScoringError: the manager returned something else.
    """
    options = {"return_dict": True} if _takes_return_dict(manager) else {}

    def judge(case: Case) -> Any:
        result = completed(manager(Batch.of(case), **options))
        if hasattr(result, "sum"):
            return float(result.sum())
        if not isinstance(result, Mapping) or "reward_tensor" not in result:
            raise ScoringError(f"the reward manager returned {type(result).__name__} without `reward_tensor`")
        extra = {name: values[0] for name, values in result.get("reward_extra_info", {}).items() if len(values)}
        return _numbers({**extra, "score": float(result["reward_tensor"].sum())})

    return judge


def _takes_return_dict(manager: Callable[..., Any]) -> bool:
    parameters = inspect.signature(manager).parameters.values()
    return any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in parameters)


def as_config(value: Any) -> Any:
    """A parameter as verl's configuration has it: the entries of a mapping are attributes as well."""
    if isinstance(value, Mapping):
        return _Section({name: as_config(each) for name, each in value.items()})
    return [as_config(each) for each in value] if isinstance(value, list) else value


class _Section(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def num_turns(trajectory: Trajectory) -> int:
    """As verl counts: the prompt, the assistant's turns, and its tools' in between, several at once as one. Of several
    branches it is the last that counts."""
    start, _ = prompt_and_response(trajectory)
    return sum(1 for _ in groupby(turn.role for turn in trajectory.turns if turn.start >= start))


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

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Batch:
        import torch

        trajectory = case.trajectory
        begin, behind = prompt_and_response(trajectory)
        start = behind - begin
        tokens = torch.tensor(trajectory.tokens[None, begin:], dtype=torch.int64)
        mask = torch.tensor(trajectory.loss_mask[None, begin:], dtype=torch.int64)
        tensors = {
            "prompts": tokens[:, :start],
            "responses": tokens[:, start:],
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "response_mask": mask[:, start:],
        }
        return cls(tensors, {name: _objects(value) for name, value in _row(case).items()})

    def __len__(self) -> int:
        return len(next(iter(self.batch.values()), next(iter(self.non_tensor_batch.values()), ())))

    def __getitem__(self, index: int | slice) -> Any:
        """One row, or the rows of a slice as a batch."""
        kind = Batch if isinstance(index, slice) else Item
        if not isinstance(index, slice) and not -len(self) <= index < len(self):
            raise IndexError(index)
        rows = {name: tensor[index] for name, tensor in self.batch.items()}
        return kind(rows, {name: values[index] for name, values in self.non_tensor_batch.items()}, self.meta_info)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> Batch:
        """Takes the named fields out, and returns them as a batch."""
        return Batch(
            {name: self.batch.pop(name) for name in batch_keys or ()},
            {name: self.non_tensor_batch.pop(name) for name in non_tensor_batch_keys or ()},
            {name: self.meta_info.pop(name) for name in meta_info_keys or ()},
        )


def _row(case: Case) -> dict[str, Any]:
    task = case.task
    return {
        "data_source": task.data_source,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": dict(task.extra_info),
        "raw_prompt": [dict(message) for message in task.messages],
        "reward_scores": {},
        "__num_turns__": num_turns(case.trajectory),
    }


def _objects(value: Any) -> np.ndarray[Any, Any]:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def _numbers(result: Any) -> Any:
    """Without what is no number; the first of several results is the score, as verl reads them."""
    if isinstance(result, tuple | list) and result:
        return result[0]
    if not isinstance(result, Mapping):
        return result
    return {name: value for name, value in result.items() if name == "score" or isinstance(plain(value), Real)}
