"""verl's reward managers naive, batch, dapo and prime."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from asyncrl.compat.verl.fields import require
from asyncrl.compat.verl.processes import in_processes
from asyncrl.compat.verl.rewarding import ComputeScore, Result, RewardManager, RewardRow, called, read_score
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.verl import as_config

PRIME_TIMEOUT_S = 300.0
"""The limit for one row; it is verl's."""


class NaiveRewardManager(RewardManager):
    """Calls `compute_score` row by row.

    With `compute_score_timeout` (seconds) it does so in another process, and raises ScoringError if a row takes longer.
    verl gives such a row the reward 0."""

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

    It gets the lists `data_sources`, `solution_strs`, `ground_truths` and `extra_infos`, and the manager's further
    parameters. The batch gets the rewards as `acc`."""

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

    It is 0 up to `max_resp_len - len` tokens, then falls linearly to `-penalty_factor` at `max_resp_len`, and further
    after that.

    `overlong_buffer_cfg` has `enable`, `len`, `penalty_factor` and `log`, as entries or as attributes; with `log`, the
    penalty and whether there is one are among the extra information. Raises DataProtoError: the lengths do not fit.
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
        if self.overlong_buffer_cfg is not None and self.overlong_buffer_cfg.enable:
            buffer = self.overlong_buffer_cfg.len
            require(max_resp_len is not None, "overlong_buffer_cfg is enabled: give max_resp_len, the longest response")
            require(
                0 < buffer <= (max_resp_len or 0),
                f"overlong_buffer_cfg.len is {buffer}; it must be from 1 to max_resp_len={max_resp_len}",
            )

    def judge(self, rows: Sequence[RewardRow]) -> list[Result]:
        return [self._result(row, number) for number, row in enumerate(rows)]

    def _result(self, row: RewardRow, number: int) -> Result:
        score, extra = read_score(called(_call(self.compute_score, row), f"row {number}"))
        told = dict(extra) or {"acc": score}
        config = self.overlong_buffer_cfg
        if config is None or not config.enable:
            return score, told
        assert self.max_resp_len is not None
        excess = row.length - (self.max_resp_len - config.len)
        penalty = min(-excess / config.len * config.penalty_factor, 0.0)
        if config.log:
            told |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return score + penalty, told

    def _text(self, tokens: Tensor) -> str:
        text = super()._text(tokens)
        end = self.tokenizer.eos_token
        return text.removesuffix(end) if end else text


class PrimeRewardManager(RewardManager):
    """Calls `compute_score` for many rows at once, in `num_processes` processes.

    By default there is one for each core, 64 at most. A row that fails or takes longer than `timeout_s` raises
    ScoringError; verl gives it the reward 0. The batch gets the rewards as `acc`. Other processes import
    `compute_score` by its name, so a script that defines it needs the usual `if __name__ == "__main__":`."""

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
        # As in verl, the arguments are passed by position.
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


_ROW = ("data_source", "solution_str", "ground_truth", "extra_info")
_ROWS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def wrong_parameters(name: str, compute_score: ComputeScore, params: Mapping[str, Any]) -> str | None:
    """The reason why the manager `name` of MANAGERS, made with `params`, cannot call this function.

    None if it can, if the function does not tell its parameters, and for other managers.
    """
    if name not in MANAGERS:
        return None
    names = _ROWS if name == "batch" else _ROW
    arguments = dict.fromkeys(names) | (dict(params) if name == "batch" else {})
    try:
        signature = inspect.signature(compute_score)
    except (TypeError, ValueError):
        return None
    try:
        # prime passes them by position, as in verl.
        if name == "prime":
            signature.bind(*_ROW)
        else:
            signature.bind(**arguments)
    except TypeError as error:
        return f"the manager {name} calls it with {', '.join(arguments)}, which it does not take: {error}"
    return None


def _call(compute_score: ComputeScore, row: RewardRow) -> Callable[[], Any]:
    return partial(
        compute_score,
        data_source=row.data_source,
        solution_str=row.response,
        ground_truth=row.ground_truth,
        extra_info=dict(row.extra_info),
    )
