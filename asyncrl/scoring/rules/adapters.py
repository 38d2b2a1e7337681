"""Functions and classes of each signature that is known, as judges."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.base import Case, Judge, completed
from asyncrl.scoring.rules.confined import Confinement
from asyncrl.scoring.rules.verl import as_config, function_judge, manager_judge

KINDS = {
    "own": ("task", "answer", "trajectory"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""The parameters of a function of each kind."""

_MANAGER = ("tokenizer", "num_examine")
_OFFERED = ("deadline", "full_answer", "confinement")
"""Further parameters that a rule of one's own may name."""

LoadTokenizer = Callable[[], Any]


def as_judge(
    found: Any, told: str, params: Mapping[str, Any], kind: str | None = None, tokenizer: LoadTokenizer | None = None
) -> Judge:
    """`found`, which the configuration has as `told`, with its `params` bound. `kind`, one of KINDS, is asked for where
    the parameters of a function do not tell; `tokenizer` by reward managers.

    Raises ConfigError: `found` has none of the known signatures, or may have two.
    """
    if isinstance(found, type) and _takes(found, _MANAGER, params):
        return _manager(found, params, told, tokenizer)
    wanted = tuple(name for name in _OFFERED if name in _names(found) - params.keys())
    takes = {"own": _takes(found, (*KINDS["own"], *wanted), params), "verl": _takes(found, KINDS["verl"], params)}
    match _choose(found, told, [each for each in KINDS if takes[each] and kind in (None, each)]):
        case "own":
            return _own(partial(found, **params), wanted)
        case "verl":
            return function_judge(partial(found, **_as_configs(params)))
    own, verl, with_params = *map(", ".join, KINDS.values()), f" and params {', '.join(params)}" if params else ""
    raise ConfigError(
        f"{told} cannot judge an episode: write a function with the parameters ({own}){with_params}, "
        f"verl's ({verl}), or a reward manager class with ({', '.join(_MANAGER)})"
    )


def _choose(found: Any, told: str, kinds: list[str]) -> str | None:
    """Of the kinds that a function may be, the one whose parameters it names."""
    if len(kinds) > 1:
        kinds = [each for each in kinds if _names(found) & set(KINDS[each])]
        if len(kinds) != 1:
            raise ConfigError(
                f"{told} does not say by its parameters whether it is a rule of yours or written for verl: give its "
                "kind in scoring.rules, as [{name: ..., kind: own}] or [{name: ..., kind: verl}]"
            )
    return kinds[0] if kinds else None


def _own(rule: Callable[..., Any], wanted: tuple[str, ...]) -> Judge:
    confinement = Confinement()

    def judge(case: Case) -> Any:
        offered = {"deadline": case.deadline, "full_answer": case.full_answer, "confinement": confinement}
        more = {name: offered[name] for name in wanted}
        return completed(rule(task=case.task, answer=case.answer, trajectory=case.trajectory, **more))

    return judge


def _manager(found: type, params: Mapping[str, Any], told: str, tokenizer: LoadTokenizer | None) -> Judge:
    made_with = _as_configs(params)
    if score := params.get("compute_score"):
        made_with["compute_score"] = imported(score, f"{told}: compute_score={score}")
    if tokenizer is None:
        return partial(_cannot, told)
    return manager_judge(found(tokenizer=tokenizer(), num_examine=0, **made_with))


def _cannot(told: str, case: Case) -> Any:
    raise ConfigError(f"{told} was loaded without a tokenizer, only to be checked")


def _as_configs(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_config(value) for name, value in params.items()}


def _takes(function: Callable[..., Any], parameters: tuple[str, ...], params: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters), **params)
    except (TypeError, ValueError):
        return False
    return True


def _names(function: Any) -> set[str]:
    """The parameters that a function names, not those that its ** would take."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
