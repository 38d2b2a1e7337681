"""Rules by name: built in, or the dotted path of a function of yours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.base import Rule, Verdict, read_verdict
from asyncrl.scoring.rules.exact_match import exact_match
from asyncrl.scoring.rules.exact_number import exact_number
from asyncrl.scoring.rules.verl import adapt
from asyncrl.types import Task, Trajectory

BUILT_IN: Mapping[str, Rule] = {"exact_match": exact_match, "exact_number": exact_number}

_OWN = ("task", "answer", "trajectory")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class RuleBook:
    """The rule of each data source, and the one for all others."""

    default: Rule
    by_source: Mapping[str, Rule]

    def judge(self, task: Task, answer: str, trajectory: Trajectory) -> Verdict:
        """The verdict of the task's rule. Raises whatever the rule raises, and ScoringError for a senseless result."""
        rule = self.by_source.get(task.data_source, self.default)
        return read_verdict(rule(task=task, answer=answer, trajectory=trajectory))


def load_rules(rule: str, rules: Mapping[str, str]) -> RuleBook:
    """The rules that `scoring.rule` and `scoring.rules` name. Raises ConfigError, which says how to mend it."""
    by_source = {source: resolve(name, f"scoring.rules.{source}") for source, name in rules.items()}
    return RuleBook(resolve(rule, "scoring.rule"), by_source)


def resolve(name: str, key: str) -> Rule:
    """The rule called `name`, which the configuration has at `key`. Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"{key}={name}: use one of {', '.join(sorted(BUILT_IN))}, or the dotted path of a function, such as "
            "my_package.rewards.score"
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise ConfigError(
            f"{key}={name} cannot be imported ({type(error).__name__}: {error}); give module.function, with the "
            "module's folder on PYTHONPATH"
        ) from error
    return _as_rule(function, f"{key}={name}")


def _as_rule(function: Any, told: str) -> Rule:
    if _takes(function, _OWN):
        own: Rule = function
        return own
    if _takes(function, _VERL):
        return adapt(function)
    raise ConfigError(
        f"{told} cannot judge an episode: write a function with the parameters ({', '.join(_OWN)}), "
        f"or verl's ({', '.join(_VERL)})"
    )


def _takes(function: Callable[..., Any], parameters: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters))
    except (TypeError, ValueError):
        return False
    return True
