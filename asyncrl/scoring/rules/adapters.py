"""Adapts functions and classes of each known signature to `RuleFunction`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.base import RuleFunction, RuleInput, completed
from asyncrl.scoring.rules.confined import Confinement
from asyncrl.scoring.rules.verl import as_config, verl_function, verl_manager

KINDS = {
    "own": ("task", "answer", "trajectory"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""The parameters of a function of each kind."""

_MANAGER = ("tokenizer", "num_examine")
_OFFERED = ("deadline", "full_answer", "confined")
"""Further parameters that the pool passes to a rule that names them; see Rule."""

LoadTokenizer = Callable[[], Any]


def adapt(
    found: Any, setting: str, params: Mapping[str, Any], kind: str | None = None, tokenizer: LoadTokenizer | None = None
) -> RuleFunction:
    """`found` with its `params` bound. `setting` is its place in the configuration, such as `scoring.rule=my.rule`.
    `kind`, one of KINDS, decides for functions whose parameters do not. Reward managers need `tokenizer`.

    Raises ConfigError: `found` has none of the known signatures, or may have two.
    """
    if isinstance(found, type) and _takes(found, _MANAGER, params):
        return _adapt_manager(found, params, setting, tokenizer)
    offered = tuple(name for name in _OFFERED if name in _names(found) - params.keys())
    takes = {"own": _takes(found, (*KINDS["own"], *offered), params), "verl": _takes(found, KINDS["verl"], params)}
    match _choose(found, setting, [each for each in KINDS if takes[each] and kind in (None, each)]):
        case "own":
            return _adapt_own(partial(found, **params), offered)
        case "verl":
            return verl_function(partial(found, **_as_configs(params)))
    own, verl, with_params = *map(", ".join, KINDS.values()), f" and params {', '.join(params)}" if params else ""
    raise ConfigError(
        f"{setting} cannot judge an episode: write a function with the parameters ({own}){with_params}, "
        f"verl's ({verl}), or a reward manager class with ({', '.join(_MANAGER)})"
    )


def _choose(found: Any, setting: str, kinds: list[str]) -> str | None:
    """Of the kinds that a function may be, the one whose parameters it names."""
    if len(kinds) > 1:
        kinds = [each for each in kinds if _names(found) & set(KINDS[each])]
        if len(kinds) != 1:
            raise ConfigError(
                f"{setting} does not say by its parameters whether it is a rule of yours or written for verl: give its "
                "kind in scoring.rules, as [{name: ..., kind: own}] or [{name: ..., kind: verl}]"
            )
    return kinds[0] if kinds else None


def _adapt_own(rule: Callable[..., Any], names: tuple[str, ...]) -> RuleFunction:
    confinement = Confinement()

    def score(given: RuleInput) -> Any:
        confined = partial(confinement.score, given.deadline)
        offered = {"deadline": given.deadline, "full_answer": given.full_answer, "confined": confined}
        more = {name: offered[name] for name in names}
        return completed(rule(task=given.task, answer=given.answer, trajectory=given.trajectory, **more))

    return score


def _adapt_manager(
    found: type, params: Mapping[str, Any], setting: str, tokenizer: LoadTokenizer | None
) -> RuleFunction:
    made_with = _as_configs(params)
    if score := params.get("compute_score"):
        made_with["compute_score"] = imported(score, f"{setting}: compute_score={score}")
    if tokenizer is None:
        return partial(_refuse, setting)
    return verl_manager(found(tokenizer=tokenizer(), num_examine=0, **made_with))


def _refuse(setting: str, given: RuleInput) -> Any:
    raise ConfigError(f"{setting} was loaded without a tokenizer, only to be checked")


def _as_configs(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_config(value) for name, value in params.items()}


def _takes(function: Callable[..., Any], parameters: tuple[str, ...], params: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters), **params)
    except (TypeError, ValueError):
        return False
    return True


def _names(function: Any) -> set[str]:
    """The parameters that a function names; its ** may take others."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
