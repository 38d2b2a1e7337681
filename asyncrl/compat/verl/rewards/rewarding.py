"""The base class of verl's reward managers. It puts the reward of each row on the last token of the response."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.base import completed
from asyncrl.scoring.rules.exact_number import MARK, final_number
from asyncrl.scoring.rules.gsm8k import gsm8k
from asyncrl.tools.contained import escape_of
from asyncrl.types import Task

logger = logging.getLogger(__name__)

ComputeScore = Callable[..., Any]
Result = tuple[float, Mapping[str, Any]]
"""The reward of a row, and extra values by name."""

LARGEST_REWARD = torch.finfo(torch.float32).max
_NO_TRAJECTORY: Any = None
"""The trajectory that a rule gets if it reads only the text."""


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One row of a batch as text, without padding and special tokens. `length` is the number of response tokens."""

    prompt: str
    response: str
    length: int
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any]


class AbstractRewardManager(ABC):
    """verl's base class of reward managers."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any: ...

    def _extract_reward_from_rm_scores(self, data: Any, return_dict: bool = False) -> Any:
        """The batch's `rm_scores` in the form that `__call__` returns; None if the batch has none."""
        if "rm_scores" not in data.batch.keys():  # noqa: SIM118
            return None
        names = data.meta_info.get("reward_extra_keys", [])
        return _returned(data.batch["rm_scores"], {name: data.non_tensor_batch[name] for name in names}, return_dict)


class RewardManager(AbstractRewardManager):
    """A reward manager with verl's constructor and call.

    `compute_score` is a function written for verl; None means `default_compute_score`. Each call logs the first
    `num_examine` rows of each data source.

    A batch needs `prompts`, `responses`, `attention_mask` and `reward_model`, whose rows have `ground_truth`.
    `reward_fn_key` is the name of the field with the data sources.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: ComputeScore = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    @abstractmethod
    def judge(self, rows: Sequence[RewardRow]) -> list[Result]:
        """The reward of each row of a batch. Passes on errors of `compute_score`, but only Exceptions: see `called`."""

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """The rewards float32[B, R], each at the last token of its response.

        With `return_dict` the result is a dict with these rewards as `reward_tensor`. Its entry `reward_extra_info` has
        a list [B] for each extra value, with None for rows that lack the value. If the batch has `rm_scores`, these are
        returned instead.

        Raises ScoringError: a reward is nan, infinite, or too large for float32. Passes on the errors of `judge`.
        """
        given = self._extract_reward_from_rm_scores(data, return_dict)
        if given is not None:
            return given
        rows = [self._row(data[number]) for number in range(len(data))]
        results, rewards = self.score(data, rows)
        self._examine(rows, results)
        self.keep(data, torch.tensor([reward for reward, _ in results], device=rewards.device))
        return _returned(rewards, returned_lists([extra for _, extra in results]), return_dict)

    def score(self, data: Any, rows: Sequence[RewardRow]) -> tuple[list[Result], Tensor]:
        """The result of each row, and token rewards float32[B, R], each at the last token of its response."""
        results = self.judge(rows)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for number, (row, (reward, _)) in enumerate(zip(rows, results, strict=True)):
            require_finite(reward, number)
            rewards[number, row.length - 1] = reward
        return results, rewards

    def keep(self, data: Any, rewards: Tensor) -> None:
        """Do nothing. A manager that adds the rewards float32[B] to the batch overrides this method."""

    def _row(self, item: Any) -> RewardRow:
        prompts, responses, attention = (item.batch[name] for name in ("prompts", "responses", "attention_mask"))
        attended = attention.bool()
        more = item.non_tensor_batch
        size = prompts.shape[-1]
        given = {"num_turns": more.get("__num_turns__"), "rollout_reward_scores": more.get("reward_scores", {})}
        return RewardRow(
            prompt=self._text(prompts[attended[:size]]),
            response=self._text(responses[attended[size:]]),
            length=int(attended[size:].sum()),
            ground_truth=more["reward_model"].get("ground_truth"),
            data_source=more[self.reward_fn_key],
            extra_info={**(more.get("extra_info") or {}), **given},
        )

    def _text(self, tokens: Tensor) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def _examine(self, rows: Sequence[RewardRow], results: Sequence[Result]) -> None:
        logged: Counter[str] = Counter()
        for row, (reward, extra) in zip(rows, results, strict=True):
            if logged[row.data_source] < self.num_examine:
                logged[row.data_source] += 1
                logger.info(
                    "[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s",
                    row.prompt,
                    row.response,
                    row.ground_truth,
                    {"reward": reward, **extra},
                )


def called(compute: Callable[[], Any], what: str) -> Any:
    """The result of a user's function, which may be a coroutine. Passes on the function's errors.

    Raises ScoringError, which names `what`: the function raised SystemExit, or something else that is not an
    `Exception`.
    """
    try:
        return completed(compute())
    except Exception:
        raise
    except BaseException as error:
        raise ScoringError(f"compute_score failed for {what}: {escape_of(error)}") from error


def require_finite(reward: float, row: int) -> None:
    """Raises ScoringError: the reward of `row` is not a finite float32."""
    # Every comparison with nan is false.
    if not abs(reward) <= LARGEST_REWARD:
        raise ScoringError(f"the reward of row {row} is {reward}; it must be a finite number that fits into float32")


def read_score(result: Any) -> Result:
    """The reward in the result of a `compute_score`, and all named values of the result."""
    if isinstance(result, Mapping):
        return float(result["score"]), dict(result)
    return float(result[0] if isinstance(result, tuple | list) else result), {}


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The built-in rule for GSM8K.

    Raises NotImplementedError: another data source. Raises ScoringError: the ground truth has no number.
    """
    if data_source != "openai/gsm8k":
        raise NotImplementedError(
            f"there is no default score for the data source {data_source!r}; pass your function as compute_score"
        )
    return gsm8k_score(solution_str, ground_truth)


def gsm8k_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for a right answer, `format_score` for an answer with a wrong number, else 0.

    With the method `strict` the number must follow `####`. Raises ScoringError: the ground truth has no number.
    """
    task = Task("row", [{"role": "user", "content": "?"}], ground_truth, "openai/gsm8k")
    if gsm8k(task, solution_str, _NO_TRAJECTORY, strict=method == "strict"):
        return score
    has_form = method != "strict" or MARK.search(solution_str)
    return format_score if has_form and final_number(solution_str) is not None else 0.0


def returned_lists(extras: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The extra values of all rows as a list for each name, with None for rows that lack the value."""
    names = dict.fromkeys(name for extra in extras for name in extra)
    return {name: [extra.get(name) for extra in extras] for name in names}


def _returned(rewards: Tensor, extra: Mapping[str, Any], return_dict: bool) -> Any:
    return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
