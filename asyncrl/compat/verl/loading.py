"""Reward managers by name or dotted path, for programs and as the rule of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.compat.verl.names import provide_verl
from asyncrl.compat.verl.process_rewards import QwenPRMRewardManager, SkyworkPRMRewardManager
from asyncrl.compat.verl.protocol import DataProto
from asyncrl.compat.verl.reward_managers import MANAGERS
from asyncrl.compat.verl.rewarding import ComputeScore
from asyncrl.config.imports import imported
from asyncrl.scoring.rules.verl import as_config

KNOWN: Mapping[str, Callable[..., Any]] = {
    **MANAGERS,
    "qwen_prm": QwenPRMRewardManager,
    "skywork_prm": SkyworkPRMRewardManager,
}
"""The managers by name."""


def load_reward_manager(
    name: str, tokenizer: Any, num_examine: int, compute_score: ComputeScore | str | None = None, **params: Any
) -> Callable[..., Any]:
    """Makes a reward manager: one of KNOWN by its `name`, or a class of yours by its dotted path. `compute_score`
    may be a dotted path too. Mappings in `params` reach the class as objects whose entries are attributes. Files that
    import verl find our classes (`provide_verl`).

    Raises ConfigError: there is no such class or function.
    """
    provide_verl()
    setting = f"reward_manager={name}"
    made = KNOWN[name] if name in KNOWN else imported(name, setting)
    if isinstance(compute_score, str):
        compute_score = imported(compute_score, f"{setting}: compute_score={compute_score}")
    given = {} if compute_score is None else {"compute_score": compute_score}
    manager: Callable[..., Any] = made(tokenizer=tokenizer, num_examine=num_examine, **given, **as_config(params))
    return manager


class VerlManager:
    """The reward manager `name` as the rule of a run: it gets a DataProto with every operation, and may import verl.
    `examine` is the manager's `num_examine`, where the rule sets it; the other parameters are those of
    `load_reward_manager`."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        name: str,
        compute_score: ComputeScore | str | None = None,
        examine: int | None = None,
        **params: Any,
    ) -> None:
        examined = num_examine if examine is None else examine
        self._manager = load_reward_manager(name, tokenizer, examined, compute_score, **params)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        batch = DataProto(dict(data.batch), dict(data.non_tensor_batch), dict(data.meta_info))
        return self._manager(batch, return_dict=return_dict)
