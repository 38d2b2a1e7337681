"""verl's reward managers naive, batch, dapo and prime."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.rewards.processes import in_processes
from asyncrl.compat.verl.rewards.reward_loop import OFFERED
from asyncrl.compat.verl.rewards.rewarding import ComputeScore, Result, RewardManager, RewardRow, called, read_score
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.verl import as_config

PRIME_TIMEOUT_S = 300.0
"""The limit for one row, as in verl."""


class NaiveRewardManager(RewardManager):
    """Calls `compute_score` row by row.

    With `compute_score_timeout` (seconds) the calls run in another process, and ScoringError is raised if a row takes
    longer. verl gives that row the reward 0.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        compute_score_timeout: float | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.compute_score_timeout = compute_score_timeout

    def judge(self, rows: Sequence[RewardRow]) -> list[Result]:
        calls = [_call(self.compute_score, row) for row in rows]
        if self.compute_score_timeout:
            return [read_score(each) for each in in_processes(calls, 1, self.compute_score_timeout)]
        return [read_score(called(call, f"row {number}")) for number, call in enumerate(calls)]


class BatchRewardManager(RewardManager):
    """Calls `compute_score` once for all rows, so that it can compare the members of a group.

    `compute_score` gets the lists `data_sources`, `solution_strs`, `ground_truths` and `extra_infos`, and
    `reward_kwargs`. The rewards are added to the batch as `acc`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def judge(self, rows: Sequence[RewardRow]) -> list[Result]:
        call = partial(
            self.compute_score,
            data_sources=[row.data_source for row in rows],
            solution_strs=[row.response for row in rows],
            ground_truths=[row.ground_truth for row in rows],
            extra_infos=[dict(row.extra_info) for row in rows],
            **self.reward_kwargs,
        )
        scores = called(call, f"a batch of {len(rows)} rows")
        if len(scores) != len(rows):
            raise ScoringError(f"compute_score returned {len(scores)} scores for {len(rows)} rows")
        return [read_score(score) for score in scores]

    def keep(self, data: Any, rewards: Tensor) -> None:
        data.batch["acc"] = rewards


class DAPORewardManager(RewardManager):
    """The naive manager with a soft penalty on long responses.

    The penalty is 0 up to `max_resp_len - len` tokens. It then falls linearly, reaches `-penalty_factor` at
    `max_resp_len`, and falls further.

    `overlong_buffer_cfg` has the entries or attributes `enable`, `len`, `penalty_factor` and `log`. With `log`, there
    are two extra values: `overlong_reward` is the penalty, and `overlong` is true if the penalty is below 0. Raises
    DataProtoError: `len` is not from 1 to `max_resp_len`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = as_config(overlong_buffer_cfg)
        require_buffer(self.overlong_buffer_cfg, max_resp_len)

    def judge(self, rows: Sequence[RewardRow]) -> list[Result]:
        return [self._result(row, number) for number, row in enumerate(rows)]

    def _result(self, row: RewardRow, number: int) -> Result:
        score, extra = read_score(called(_call(self.compute_score, row), f"row {number}"))
        penalty, told = overlong_penalty(self.overlong_buffer_cfg, self.max_resp_len, row.length)
        return score + penalty, {**(extra or {"acc": score}), **told}

    def _text(self, tokens: Tensor) -> str:
        text = super()._text(tokens)
        end = self.tokenizer.eos_token
        return text.removesuffix(end) if end else text


def require_buffer(buffer: Any, max_resp_len: int | None) -> None:
    """Raises DataProtoError: `buffer`, an `overlong_buffer_cfg`, is enabled, and its `len` is not from 1 to
    `max_resp_len`."""
    if buffer is None or not buffer.enable:
        return
    require(max_resp_len is not None, "overlong_buffer_cfg is enabled: set max_resp_len")
    require(
        0 < buffer.len <= (max_resp_len or 0),
        f"overlong_buffer_cfg.len is {buffer.len}; it must be from 1 to max_resp_len={max_resp_len}",
    )


def overlong_penalty(buffer: Any, max_resp_len: int | None, length: int) -> tuple[float, dict[str, Any]]:
    """DAPO's penalty on a response of `length` tokens, and the extra values that `buffer.log` asks for."""
    if buffer is None or not buffer.enable:
        return 0.0, {}
    assert max_resp_len is not None
    excess = length - (max_resp_len - buffer.len)
    penalty = min(-excess / buffer.len * buffer.penalty_factor, 0.0)
    return penalty, {"overlong_reward": penalty, "overlong": penalty < 0} if buffer.log else {}


class PrimeRewardManager(RewardManager):
    """Calls `compute_score` for many rows at once, in `num_processes` processes.

    By default there is one process for each core, at most 64. A row that fails or takes longer than `timeout_s` raises
    ScoringError; verl gives that row the reward 0. The rewards are added to the batch as `acc`. The processes import
    `compute_score` by its name, so a script that defines the function needs `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        num_processes: int | None = None,
        timeout_s: float = PRIME_TIMEOUT_S,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.num_processes = num_processes or min(64, len(os.sched_getaffinity(0)))
        self.timeout_s = timeout_s

    def judge(self, rows: Sequence[RewardRow]) -> list[Result]:
        # verl passes the arguments by position.
        calls = [
            partial(self.compute_score, row.data_source, row.response, row.ground_truth, dict(row.extra_info))
            for row in rows
        ]
        results = in_processes(calls, self.num_processes, self.timeout_s)
        return [(read_score(each)[0], {}) for each in results]

    def keep(self, data: Any, rewards: Tensor) -> None:
        data.batch["acc"] = rewards


MANAGERS: Mapping[str, Callable[..., Any]] = {
    "naive": NaiveRewardManager,
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
    "prime": PrimeRewardManager,
}


ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of a `compute_score` for one row."""
_ROWS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def wrong_parameters(name: str, compute_score: ComputeScore, params: Mapping[str, Any]) -> str | None:
    """The reason why the manager `name`, made with `params`, cannot call `compute_score`.

    The result is None if it can, if the function's parameters cannot be read, or if the manager is a user's class.
    """
    if "." in name:
        return None
    names = _ROWS if name == "batch" else ARGUMENTS
    offered = OFFERED if params.get(OFFERED[0]) is not None else ()
    arguments = dict.fromkeys((*names, *offered)) | (dict(params) if name == "batch" else {})
    try:
        signature = inspect.signature(compute_score)
    except (TypeError, ValueError):
        return None
    try:
        # prime passes the arguments by position, as in verl.
        if name == "prime":
            signature.bind(*ARGUMENTS)
        else:
            signature.bind(**arguments)
    except TypeError as error:
        return f"the manager {name} passes {', '.join(arguments)}, which the function does not take: {error}"
    return None


def _call(compute_score: ComputeScore, row: RewardRow) -> Callable[[], Any]:
    return partial(
        compute_score,
        data_source=row.data_source,
        solution_str=row.response,
        ground_truth=row.ground_truth,
        extra_info=dict(row.extra_info),
    )
