"""Rules by name: built in, or the dotted path of a function or class of yours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.imports import imported
from asyncrl.scoring.rules.base import Case, Judge, Verdict, read_result
from asyncrl.scoring.rules.verl import function_judge, manager_judge

BUILT_IN = (
    "code",
    "exact_match",
    "exact_number",
    "f1",
    "format",
    "gsm8k",
    "json_schema",
    "math",
    "multiple_choice",
    "tool_calls",
)
"""The rule NAME is the function NAME in rules/NAME.py."""

_OWN = ("task", "answer", "trajectory")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_MANAGER = ("tokenizer", "num_examine")

LoadTokenizer = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class WeightedRule:
    """A rule, the name under which its score is told, and what that weighs."""

    name: str
    judge: Judge
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RuleBook:
    """The rules of each data source, and those for all others; the first of them says whether an answer is right."""

    default: Sequence[WeightedRule]
    by_source: Mapping[str, Sequence[WeightedRule]]

    def judge(self, case: Case) -> Verdict:
        """The verdict of the task's rules. Raises whatever a rule raises, and ScoringError for a senseless result."""
        scores: dict[str, float] = {}
        rules = self.by_source.get(case.task.data_source, self.default)
        for rule in rules:
            scores[rule.name], extra = read_result(rule.judge(case))
            scores.update({f"{rule.name}/{name}": value for name, value in extra.items()})
        total = sum(rule.weight * scores[rule.name] for rule in rules)
        return Verdict(scores[rules[0].name], total, scores)


def load_rules(config: ScoringConfig, tokenizer: LoadTokenizer | None = None) -> RuleBook:
    """The rules that `scoring.rule` and `scoring.rules` name.

    `tokenizer` gives the policy's, which verl's reward managers read with; without it they are checked but not made,
    and cannot judge. Raises ConfigError, which says how to mend it.
    """
    by_source = {source: _read(value, f"scoring.rules.{source}", tokenizer) for source, value in config.rules.items()}
    return RuleBook(_read(config.rule, "scoring.rule", tokenizer), by_source)


def rule_names(config: ScoringConfig, data_source: str) -> str:
    """The names of the rules of a data source, as they stand in the configuration."""
    value = config.rules.get(data_source, config.rule)
    return value if isinstance(value, str) else ",".join(str(_entry(each, "")["name"]) for each in value)


def _read(value: Any, key: str, tokenizer: LoadTokenizer | None) -> list[WeightedRule]:
    if not isinstance(value, str | list) or not value:
        raise ConfigError(f"{key}={value!r}: give the name of a rule, or a list such as [{{name: gsm8k, weight: 1.0}}]")
    rules = []
    for entry in [value] if isinstance(value, str) else value:
        fields = _entry(entry, key)
        judge = resolve(fields["name"], key, fields.get("params", {}), tokenizer)
        rules.append(WeightedRule(fields["name"].rpartition(".")[2], judge, float(fields.get("weight", 1.0))))
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} has two rules of one name among {', '.join(names)}; name each once")
    return rules


def _entry(entry: Any, key: str) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"name": entry}
    known = {"name", "weight", "params"}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry.keys() <= known:
        raise ConfigError(
            f"{key} holds {entry!r:.100}; each rule is a name, or {{name: ..., weight: ..., params: ...}}"
        )
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{key}: the weight of {entry['name']} is {weight!r}; it must be a number")
    return entry


def resolve(
    name: str, key: str, params: Mapping[str, Any] | None = None, tokenizer: LoadTokenizer | None = None
) -> Judge:
    """The rule called `name`, which the configuration has at `key`, with its `params` bound. Raises ConfigError."""
    if name in BUILT_IN:
        module = importlib.import_module(f"asyncrl.scoring.rules.{name}")
        return _as_judge(getattr(module, name), f"{key}={name}", params or {}, tokenizer)
    if "." not in name:
        raise ConfigError(
            f"{key}={name}: use one of {', '.join(BUILT_IN)}, or the dotted path of a function, such as "
            "my_package.rewards.score"
        )
    return _as_judge(imported(name, f"{key}={name}"), f"{key}={name}", params or {}, tokenizer)


def _as_judge(found: Any, told: str, params: Mapping[str, Any], tokenizer: LoadTokenizer | None) -> Judge:
    if isinstance(found, type) and _takes(found, _MANAGER, params):
        return _manager(found, params, told, tokenizer)
    if _takes(found, _OWN, params):
        return partial(_ask, partial(found, **params))
    if _takes(found, _VERL, params):
        return function_judge(partial(found, **params))
    with_params = f" and params {', '.join(params)}" if params else ""
    raise ConfigError(
        f"{told} cannot judge an episode: write a function with the parameters ({', '.join(_OWN)}){with_params}, "
        f"verl's ({', '.join(_VERL)}), or a reward manager class with ({', '.join(_MANAGER)})"
    )


def _ask(rule: Callable[..., Any], case: Case) -> Any:
    return rule(task=case.task, answer=case.answer, trajectory=case.trajectory)


def _manager(found: type, params: Mapping[str, Any], told: str, tokenizer: LoadTokenizer | None) -> Judge:
    score = params.get("compute_score")
    made_with = {**params, "compute_score": imported(score, f"{told}: compute_score={score}")} if score else params
    if tokenizer is None:
        return partial(_cannot, told)
    return manager_judge(found(tokenizer=tokenizer(), num_examine=0, **made_with))


def _cannot(told: str, case: Case) -> Any:
    raise ConfigError(f"{told} was loaded without a tokenizer, only to be checked")


def _takes(function: Callable[..., Any], parameters: tuple[str, ...], params: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters), **params)
    except (TypeError, ValueError):
        return False
    return True
