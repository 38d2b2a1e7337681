"""Loads reward managers and interactions by name or dotted path, for programs and runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.names import provide_verl
from asyncrl.compat.verl.rewards.loop_managers import LOOP_MANAGERS
from asyncrl.compat.verl.rewards.process_rewards import QwenPRMRewardManager, SkyworkPRMRewardManager
from asyncrl.compat.verl.rewards.reward_loop import RewardLoop, judges_rows, settings_of
from asyncrl.compat.verl.rewards.reward_managers import ARGUMENTS, MANAGERS
from asyncrl.compat.verl.rewards.rewarding import ComputeScore, default_compute_score
from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.verl import as_config
from asyncrl.tools.interactions.base import Interaction, Response

KNOWN: Mapping[str, Callable[..., Any]] = {
    **MANAGERS,
    "qwen_prm": QwenPRMRewardManager,
    "skywork_prm": SkyworkPRMRewardManager,
    **LOOP_MANAGERS,
}
"""The managers by name."""


def load_reward_manager(
    name: str,
    tokenizer: Any,
    num_examine: int,
    compute_score: ComputeScore | str | None = None,
    compute_score_params: Mapping[str, Any] | None = None,
    **params: Any,
) -> Callable[..., Any]:
    """Make a reward manager: `name` is a key of KNOWN, or the path of a class (module.Class or FILE.py:Class).

    `compute_score` is a function, or the path of one; each call of it also passes `compute_score_params`. A mapping in
    `params` becomes an object with its entries as attributes. If the class's file imports verl, it gets asyncrl's
    classes (`provide_verl`).

    A class with a coroutine function `run_single` is a manager for single rows (`RewardManagerBase`): it is made with
    `config` in the place of `num_examine` (`settings_of` says what `config` has).

    Raises ConfigError: the class or function does not exist.
    """
    made, given = find_reward_manager(name, compute_score, compute_score_params)
    if judges_rows(made):
        score = given.get("compute_score", default_compute_score)
        return RewardLoop(lambda: made(tokenizer=tokenizer, compute_score=score, **settings_of(made, params)))
    manager: Callable[..., Any] = made(tokenizer=tokenizer, num_examine=num_examine, **given, **as_config(params))
    return manager


def find_reward_manager(
    name: str, compute_score: ComputeScore | str | None, compute_score_params: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], dict[str, ComputeScore]]:
    """The class of a reward manager, and `compute_score` as a keyword argument for it if there is such a function.

    Raises ConfigError: the class or function does not exist, or `compute_score_params` are wrong.
    """
    provide_verl()
    setting = f"reward_manager={name}"
    if name not in KNOWN and "." not in name:
        raise ConfigError(f"{setting}: use one of {', '.join(KNOWN)}, or the dotted path of a class")
    made = KNOWN[name] if name in KNOWN else imported(name, setting)
    if isinstance(compute_score, str):
        function: ComputeScore | None = imported(compute_score, f"{setting}: compute_score={compute_score}")
    else:
        function = compute_score
    params = compute_score_params or {}
    if wrong := next((each for each in params if each in ARGUMENTS or function is None), None):
        reason = "every call passes it" if wrong in ARGUMENTS else "name the function in compute_score"
        raise ConfigError(f"{setting}: compute_score_params has {wrong}: {reason}")
    if function is None:
        return made, {}
    # verl's name for `compute_score_params` is `reward_kwargs`.
    return made, {"compute_score": partial(function, **as_config(params)) if params else function}


class VerlManager:
    """A reward manager as an entry of `scoring.rules`. The manager gets a DataProto with all operations, and its file
    may import verl.

    If `examine` is given, it replaces `num_examine`. `load_reward_manager` explains the other parameters.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        name: str,
        compute_score: ComputeScore | str | None = None,
        compute_score_params: Mapping[str, Any] | None = None,
        examine: int | None = None,
        **params: Any,
    ) -> None:
        examined = num_examine if examine is None else examine
        self._manager = load_reward_manager(name, tokenizer, examined, compute_score, compute_score_params, **params)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        batch = DataProto(dict(data.batch), dict(data.non_tensor_batch), dict(data.meta_info))
        return self._manager(batch, return_dict=return_dict)


class VerlInteraction(Interaction):
    """A simulated user written for verl. `config.class_name` is the dotted path of a class with the methods of verl's
    interactions. Its file may import verl. The class gets the rest of `config`.

    As in verl, a turn has no score if `generate_response` gives None. `finalize_interaction` is only called if it takes
    an id; in verl's own base class it takes none.

    Raises ConfigError: the class does not exist or lacks a method.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        provide_verl()
        name = str(config.get("class_name"))
        cls = imported(name, f"config.class_name={name}", "the dotted path of a class written for verl")
        needed = ("start_interaction", "generate_response", "finalize_interaction")
        for method in needed:
            if not inspect.iscoroutinefunction(getattr(cls, method, None)):
                raise ConfigError(f"config.class_name={name} has no `async def {method}`, as verl's interactions have")
        self._theirs: Any = cls(config={key: value for key, value in config.items() if key != "class_name"})

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._theirs.start_interaction(instance_id, **kwargs)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        response: Response = await self._theirs.generate_response(instance_id, messages, **kwargs)
        return response

    async def finalize_interaction(self, instance_id: str) -> None:
        try:
            inspect.signature(self._theirs.finalize_interaction).bind(instance_id)
        except TypeError:
            return
        await self._theirs.finalize_interaction(instance_id)
