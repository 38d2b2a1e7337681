"""verl's base class of reward managers that judge one row in a coroutine, and the loop that runs them over a batch."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from asyncrl.compat.verl.rewards.rewarding import Result, require_finite, returned_lists
from asyncrl.errors import AsyncrlError, ScoringError
from asyncrl.text import line_of_function, reason_of
from asyncrl.tools.call_threads import open_to_users
from asyncrl.tools.contained import contained

Made = TypeVar("Made", bound=type)

REWARD_MANAGER: dict[str, type] = {}
"""The classes that `register` has named in this process, as in verl. A run names a class by its path instead."""
OFFERED = ("reward_router_address", "reward_model_tokenizer")
"""Parameters that verl gives to each manager, and that are None unless the settings have them."""


class RewardManagerBase(ABC):
    """verl's base class of reward managers, which judge one row at a time.

    `config` has verl's configuration, or the part of it that the manager reads. The rows of a batch are judged
    concurrently.
    """

    _class_initialized: ClassVar[bool] = False

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.loop = get_event_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        """Prepare what all instances of the class share. Each instance calls this."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]:
        """Judge the last row of a batch. The result has `reward_score`, and maybe `reward_extra_info`."""

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Tensor:
        """The scores of B rows as token rewards float32[B, R], each at the last token of its response."""
        size = data.batch["prompts"].size(1)
        last = data.batch["attention_mask"][:, size:].sum(dim=1) - 1
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(scores), device=rewards.device), last] = rewards.new_tensor(scores)
        return rewards


def register(name: str) -> Callable[[Made], Made]:
    """Decorate a class, so that `get_reward_manager_cls` finds it. Raises ValueError: another class has this name."""

    def decorate(cls: Made) -> Made:
        if REWARD_MANAGER.setdefault(name, cls) is not cls:
            raise ValueError(f"reward manager {name} has already been registered: {REWARD_MANAGER[name]} vs {cls}")
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> type:
    """The registered class of this name. Raises ValueError: there is none."""
    if name not in REWARD_MANAGER:
        raise ValueError(f"Unknown reward manager: {name}")
    return REWARD_MANAGER[name]


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop. If none runs, the loop of this thread, which is made if needed."""
    try:
        return asyncio.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def judges_rows(made: Any) -> bool:
    """True if `made` is a class of managers that judge single rows in a coroutine."""
    return inspect.iscoroutinefunction(getattr(made, "run_single", None))


def settings_of(made: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the constructor of `made`, without `tokenizer` and `compute_score`.

    `params` that the constructor names are passed on. `params["config"]` is verl's configuration. All other params are
    entries of its sections `reward` and `reward.reward_kwargs`.
    """
    parameters = inspect.signature(made).parameters
    named = {name for name in parameters if name != "config"}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        named |= set(OFFERED)
    passed = {name: params[name] for name in params if name in named}
    rest = {name: value for name, value in params.items() if name not in named and name != "config"}
    given = OmegaConf.create({"reward": {**rest, "reward_kwargs": rest}}, flags={"allow_objects": True})
    config = OmegaConf.merge(given, params.get("config") or {})
    return {"config": config, **{name: None for name in OFFERED if name in named}, **passed}


class RewardLoop:
    """Judges the rows of a batch concurrently by a manager's `run_single`. It is called like verl's older managers.

    `make` makes the manager, which runs in an event loop of its own.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        open_to_users(self._loop, "a reward manager")
        weakref.finalize(self, self._loop.close)

        async def made() -> Any:
            return make()

        # A manager keeps the loop that runs while it is made.
        self.manager = self._loop.run_until_complete(made())

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """The rewards of the rows, as `RewardManager` returns them.

        Raises ScoringError, which names the row: `run_single` failed, or gave no finite number.
        """
        results = self._loop.run_until_complete(self._judged(data))
        rewards = self.manager.assemble_rm_scores(data, [reward for reward, _ in results])
        extra = returned_lists([extra for _, extra in results])
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    @property
    def _named(self) -> str:
        """The method `run_single` with its class and its place, such as `Mine.run_single (my_manager.py, line 3)`."""
        line = line_of_function(type(self.manager).run_single)
        return f"{type(self.manager).__qualname__}.run_single{line and f' ({line})'}"

    async def _judged(self, data: Any) -> Sequence[Result]:
        rows = [asyncio.ensure_future(self._row(data[row : row + 1], row)) for row in range(len(data))]
        try:
            return await asyncio.gather(*rows)
        finally:
            # If a row has failed, the batch fails, so the other rows need not be judged.
            for each in rows:
                each.cancel()
            await asyncio.gather(*rows, return_exceptions=True)

    async def _row(self, data: Any, row: int) -> Result:
        try:
            result = await contained(lambda: self.manager.run_single(data))
        except Exception as error:
            reason = str(error) if isinstance(error, AsyncrlError) else reason_of(error)
            raise ScoringError(f"run_single failed for row {row}: {reason}") from error
        if not isinstance(result, Mapping) or "reward_score" not in result:
            raise ScoringError(
                f"{self._named} returned {result!r:.200} for row {row}; it must return a mapping with reward_score"
            )
        score, extra = result["reward_score"], result.get("reward_extra_info")
        try:
            reward = float(score)
            told = dict(extra or {})
        except Exception as error:
            raise ScoringError(
                f"{self._named} returned reward_score={score!r:.100} and reward_extra_info={extra!r:.100} for row "
                f"{row}; they must be a number, and a mapping or None"
            ) from error
        require_finite(reward, row)
        return reward, told
