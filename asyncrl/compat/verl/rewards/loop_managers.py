"""verl's reward managers for single rows: naive, dapo, gdpo, rate_limited and remote."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any, ClassVar

from omegaconf import DictConfig

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.rewards.processes import in_processes
from asyncrl.compat.verl.rewards.rate_limits import RequestGate, RequestLimits
from asyncrl.compat.verl.rewards.reward_loop import OFFERED, RewardManagerBase, register
from asyncrl.compat.verl.rewards.reward_managers import overlong_penalty, require_buffer
from asyncrl.compat.verl.rewards.rewarding import Result, default_compute_score, read_score
from asyncrl.errors import ScoringError
from asyncrl.tools.call_threads import CallThreads
from asyncrl.tools.contained import EscapeError, contained

TIMEOUT_S = 300.0
"""The default time limit for one row of `rate_limited` and `remote`."""
SHOWN = 60
"""The number of characters of a response that an error shows."""


@register("naive")
class NaiveLoopManager(RewardManagerBase):
    """Calls `compute_score`, in a thread of its own unless it is a coroutine function.

    With `reward_router_address`, the function also gets this address and `reward_model_tokenizer`.
    """

    keys: ClassVar[tuple[str, ...]] = OFFERED
    """The names that a run may give as the manager's parameters: parameters of its constructor, and settings that the
    manager reads from `config.reward` or `config.reward.reward_kwargs`."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score or default_compute_score
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self._threads = CallThreads("compute_score")
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer

    async def run_single(self, data: Any) -> dict[str, Any]:
        item = data[-1]
        responses = item.batch["responses"]
        length = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        text = self.tokenizer.decode(responses[:length].tolist(), skip_special_tokens=True)
        reward, told = read_score(await self.called(self._call(item, str(text))))
        reward, told = self.shaped(reward, dict(told) or {"acc": reward}, length)
        return {"reward_score": reward, "reward_extra_info": told}

    async def called(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, which calls `compute_score` with a row."""
        try:
            return await contained(call if self.is_async_reward_score else partial(self._threads.call, call))
        except EscapeError as error:
            raise ScoringError(f"compute_score failed: {error}") from error

    def shaped(self, reward: float, told: Mapping[str, Any], length: int) -> Result:
        """The reward of a response of `length` tokens, and its extra values."""
        return reward, told

    def more_info(self) -> dict[str, Any]:
        """Entries that are added to the row's `extra_info`."""
        return {}

    def _call(self, item: Any, response: str) -> Callable[[], Any]:
        row = item.non_tensor_batch
        info = {**(row.get("extra_info") or {}), **(row.get("tool_extra_fields") or {}), **self.more_info()}
        info |= {"num_turns": row.get("__num_turns__"), "rollout_reward_scores": row.get("reward_scores", {})}
        offered = {name: getattr(self, name) for name in OFFERED} if self.reward_router_address is not None else {}
        return partial(
            self.compute_score,
            data_source=row["data_source"],
            solution_str=response,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=info,
            **offered,
        )


@register("dapo")
class DAPOLoopManager(NaiveLoopManager):
    """The naive manager with DAPO's penalty on long responses: see `DAPORewardManager`.

    `max_resp_len` and `overlong_buffer_cfg` are in `config.reward.reward_kwargs`.
    """

    keys = (*OFFERED, "max_resp_len", "overlong_buffer_cfg")

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **offered: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **offered)
        given = config.reward.get("reward_kwargs") or {}
        self.overlong_buffer_cfg = given.get("overlong_buffer_cfg")
        self.max_resp_len = given.get("max_resp_len")
        require_buffer(self.overlong_buffer_cfg, self.max_resp_len)

    def shaped(self, reward: float, told: Mapping[str, Any], length: int) -> Result:
        penalty, of_penalty = overlong_penalty(self.overlong_buffer_cfg, self.max_resp_len, length)
        return reward + penalty, {**told, **of_penalty}


@register("gdpo")
class GDPOLoopManager(NaiveLoopManager):
    """The naive manager. Its function also gets `config.trainer.experiment_name`, in `extra_info`."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **offered: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **offered)
        name = (config.get("trainer") or {}).get("experiment_name")
        require(name is not None, "gdpo passes trainer.experiment_name to compute_score: the configuration has none")
        self.experiment_name = str(name)

    def more_info(self) -> dict[str, Any]:
        return {"experiment_name": self.experiment_name}


@register("rate_limited")
class RateLimitedRewardManager(NaiveLoopManager):
    """The naive manager for functions that ask a service. Calls keep within limits. Each may take `timeout` seconds.

    `config.reward` has the fields of `RequestLimits`, and `timeout`. Managers of one process with equal limits share
    these limits. A call that fails or takes too long is an error; verl gives that row the reward 0.
    """

    keys = (*OFFERED, "timeout", *(each.name for each in fields(RequestLimits)))
    gates: ClassVar[dict[RequestLimits, RequestGate]] = {}
    """The gate of this process for each set of limits. Managers share it, since the service counts all requests."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **offered: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **offered)
        given = config.get("reward") or {}
        self.timeout = float(given.get("timeout", TIMEOUT_S))
        limits = RequestLimits(**{name: given.get(name, value) for name, value in asdict(RequestLimits()).items()})
        self._gate = self.gates.setdefault(limits, RequestGate(limits))

    async def called(self, call: Callable[[], Any]) -> Any:
        async with self._gate.request():
            limit = asyncio.timeout(self.timeout)
            try:
                async with limit:
                    return await super().called(call)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise ScoringError(f"compute_score took longer than timeout={self.timeout:g}") from error


@register("remote")
class RemoteRewardManager(NaiveLoopManager):
    """The naive manager, but each call of `compute_score` runs in a process of its own. Up to
    `config.reward.num_workers` calls run at once.

    By default `num_workers` is the number of cores, but at most 64. A row may take `config.reward.timeout` seconds, by
    default 300.
    """

    keys = (*OFFERED, "timeout", "num_workers")

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **offered: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **offered)
        given = config.get("reward") or {}
        self.timeout = float(given.get("timeout", TIMEOUT_S))
        workers = int(given.get("num_workers") or min(64, len(os.sched_getaffinity(0))))
        self._gate = RequestGate(RequestLimits(max_concurrent=workers))

    async def called(self, call: Callable[[], Any]) -> Any:
        assert isinstance(call, partial)
        names = [f"the response {call.keywords['solution_str'][:SHOWN]!r}"]
        async with self._gate.request():
            work = partial(in_processes, [call], 1, self.timeout, names=names)
            return (await asyncio.to_thread(work))[0]


LOOP_MANAGERS: Mapping[str, type[NaiveLoopManager]] = {
    "gdpo": GDPOLoopManager,
    "rate_limited": RateLimitedRewardManager,
    "remote": RemoteRewardManager,
}
"""The managers for single rows whose names are not those of managers for whole batches (`reward_managers.MANAGERS`)."""
