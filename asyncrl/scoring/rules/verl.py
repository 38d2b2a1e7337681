"""Reward functions and reward managers written for verl, used unchanged.

A function is `compute_score(data_source, solution_str, ground_truth, extra_info)`. As in verl, `solution_str` is all
text after the prompt, tool results included, without special tokens. A manager is an object: it is made with a
tokenizer, and called with a batch. Here each batch has one episode.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Real
from typing import Any

import numpy as np

from asyncrl.errors import ScoringError
from asyncrl.scoring.answers import prompt_and_response
from asyncrl.scoring.rules.base import TEXTS, RuleFunction, RuleInput, completed, plain
from asyncrl.types import Trajectory

USER_TURN_REWARDS = "user_turn_rewards"


def verl_function(compute_score: Callable[..., Any]) -> RuleFunction:
    """The rule that calls `compute_score`, which may be a coroutine function. From its result, the rule keeps numbers
    and the texts `pred` and `reason`."""

    def score(given: RuleInput) -> Any:
        more = {
            "num_turns": num_turns(given.trajectory),
            "rollout_reward_scores": rollout_reward_scores(given.trajectory),
        }
        result = compute_score(
            data_source=given.task.data_source,
            solution_str=given.response,
            ground_truth=copy.deepcopy(given.task.ground_truth),
            extra_info={**given.task.extra_info, **more},
        )
        return _numbers(completed(result))

    return score


def verl_manager(manager: Callable[..., Any]) -> RuleFunction:
    """The rule that calls a reward manager. The score is the sum of the manager's reward tensor, and the further
    numbers are its extra info. A manager whose call has no parameter
    `return_dict` returns only the tensor.

    The rule raises ScoringError if the manager returns something else.
    """
    options = call_options(manager)

    def score(given: RuleInput) -> Any:
        result = completed(manager(VerlBatch.of(given), **options))
        if hasattr(result, "sum"):
            return float(result.sum())
        if not isinstance(result, Mapping) or "reward_tensor" not in result:
            raise ScoringError(f"the reward manager returned {type(result).__name__} without `reward_tensor`")
        extra = {name: values[0] for name, values in result.get("reward_extra_info", {}).items() if len(values)}
        return _numbers({**extra, "score": float(result["reward_tensor"].sum())})

    return score


def call_options(manager: Callable[..., Any]) -> dict[str, bool]:
    """The options of a manager's call: `return_dict=True` if the call takes it."""
    parameters = inspect.signature(manager).parameters.values()
    takes_option = any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in parameters)
    return {"return_dict": True} if takes_option else {}


def as_config(value: Any) -> Any:
    """A parameter in the form of verl's configuration: entries of a mapping can also be read as attributes."""
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
    """The number of turns as verl counts them: the prompt, the assistant's turns, and the tool turns in between.
    Consecutive tool turns count as one turn. Only the last branch counts."""
    start, _ = prompt_and_response(trajectory)
    return sum(1 for _ in groupby(turn.role for turn in trajectory.turns if turn.start >= start))


def rollout_reward_scores(trajectory: Trajectory) -> dict[str, Any]:
    """The rewards of an episode's environment, in the form that verl passes to reward functions.

    They are the tools' rewards by name and, if a simulated user scored turns, these scores as the list
    `user_turn_rewards`.
    """
    scores = trajectory.turn_scores
    return {**trajectory.rewards, **({USER_TURN_REWARDS: scores} if scores else {})}


Names = Sequence[str]


@dataclass(frozen=True)
class VerlBatch:
    """A batch of one episode under the names of verl's DataProto.

    `batch` has these tensors, for P tokens of the prompt and R tokens of the response:

    - `prompts` int64[1, P] and `responses` int64[1, R]; `input_ids` int64[1, P + R] has both
    - `attention_mask` int64[1, P + R], all ones
    - `response_mask` int64[1, R]: 1 on the policy's own tokens

    The arrays in `non_tensor_batch` have one object each.
    """

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: RuleInput) -> VerlBatch:
        import torch

        task, trajectory = given.task, given.trajectory
        begin, response = prompt_and_response(trajectory)
        start = response - begin
        tokens = torch.tensor(trajectory.tokens[None, begin:], dtype=torch.int64)
        mask = torch.tensor(trajectory.loss_mask[None, begin:], dtype=torch.int64)
        tensors = {
            "prompts": tokens[:, :start],
            "responses": tokens[:, start:],
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "response_mask": mask[:, start:],
        }
        row = {
            "data_source": task.data_source,
            "reward_model": {"style": "rule", "ground_truth": copy.deepcopy(task.ground_truth)},
            "extra_info": dict(task.extra_info),
            "raw_prompt": [dict(message) for message in task.messages],
            "reward_scores": rollout_reward_scores(trajectory),
            "turn_scores": trajectory.turn_scores,
            "__num_turns__": num_turns(trajectory),
        }
        return cls(tensors, {name: _objects(value) for name, value in row.items()})

    def __len__(self) -> int:
        return len(next(iter(self.batch.values()), next(iter(self.non_tensor_batch.values()), ())))

    def __getitem__(self, index: int | slice) -> VerlBatch:
        """The rows of a slice, or one row, whose fields have no batch dimension."""
        if not isinstance(index, slice) and not -len(self) <= index < len(self):
            raise IndexError(index)
        rows = {name: tensor[index] for name, tensor in self.batch.items()}
        return VerlBatch(rows, {name: values[index] for name, values in self.non_tensor_batch.items()}, self.meta_info)

    def __iter__(self) -> Iterator[VerlBatch]:
        return (self[index] for index in range(len(self)))

    def pop(self, batch_keys: Names = (), non_tensor_batch_keys: Names = (), meta_info_keys: Names = ()) -> VerlBatch:
        """Removes the named fields, and returns them as a batch."""
        return VerlBatch(
            {name: self.batch.pop(name) for name in batch_keys or ()},
            {name: self.non_tensor_batch.pop(name) for name in non_tensor_batch_keys or ()},
            {name: self.meta_info.pop(name) for name in meta_info_keys or ()},
        )


def _objects(value: Any) -> np.ndarray[Any, Any]:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def _numbers(result: Any) -> Any:
    """The numbers of a result, with the texts `pred` and `reason`. As in verl, the first item of a tuple or list is the
    score."""
    if isinstance(result, tuple | list) and result:
        return result[0]
    if not isinstance(result, Mapping):
        return result
    return {name: value for name, value in result.items() if _stays(name, value)}


def _stays(name: str, value: Any) -> bool:
    return name == "score" or isinstance(plain(value), Real) or (name in TEXTS and isinstance(value, str))
