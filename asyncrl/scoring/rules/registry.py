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
from asyncrl.scoring.rules.base import Case, Judge, Verdict, completed, read_result
from asyncrl.scoring.rules.verl import as_config, function_judge, manager_judge

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
_FUNCTIONS = {"own": _OWN, "verl": _VERL}
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
        judge = resolve(fields["name"], key, fields.get("params", {}), tokenizer, fields.get("kind"))
        name = fields.get("as") or fields["name"].rpartition(".")[2]
        rules.append(WeightedRule(name, judge, float(fields.get("weight", 1.0))))
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} has two rules of one name among {', '.join(names)}; give one another name with `as`")
    return rules


def _entry(entry: Any, key: str) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"name": entry}
    known = {"name", "as", "kind", "weight", "params"}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry.keys() <= known:
        raise ConfigError(
            f"{key} holds {entry!r:.100}; each rule is a name, or {{name: ..., weight: ..., params: ...}}, with `as` "
            "and `kind` where needed"
        )
    name, weight, alias = entry["name"], entry.get("weight", 1.0), entry.get("as")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{key}: the weight of {name} is {weight!r}; it must be a number")
    if entry.get("kind") not in (None, *_FUNCTIONS):
        raise ConfigError(f"{key}: the kind of {name} is {entry['kind']!r}; use one of {', '.join(_FUNCTIONS)}")
    if alias is not None and (not isinstance(alias, str) or not alias or "/" in alias):
        raise ConfigError(f"{key}: {name} is to be told as {alias!r}; give a name without a slash")
    return entry


def resolve(
    name: str,
    key: str,
    params: Mapping[str, Any] | None = None,
    tokenizer: LoadTokenizer | None = None,
    kind: str | None = None,
) -> Judge:
    """The rule called `name`, which the configuration has at `key`, with its `params` bound. `kind` says whether a
    function is `own` or `verl`, where its parameters do not. Raises ConfigError."""
    if name in BUILT_IN:
        module = importlib.import_module(f"asyncrl.scoring.rules.{name}")
        return _as_judge(getattr(module, name), f"{key}={name}", params or {}, tokenizer, kind)
    if "." not in name:
        raise ConfigError(
            f"{key}={name}: use one of {', '.join(BUILT_IN)}, or the dotted path of a function, such as "
            "my_package.rewards.score"
        )
    return _as_judge(imported(name, f"{key}={name}"), f"{key}={name}", params or {}, tokenizer, kind)


def _as_judge(
    found: Any, told: str, params: Mapping[str, Any], tokenizer: LoadTokenizer | None, kind: str | None
) -> Judge:
    if isinstance(found, type) and _takes(found, _MANAGER, params):
        return _manager(found, params, told, tokenizer)
    fitting = [each for each, names in _FUNCTIONS.items() if kind in (None, each) and _takes(found, names, params)]
    if len(fitting) > 1:
        fitting = [each for each in fitting if _names(found) & set(_FUNCTIONS[each])]
        if len(fitting) != 1:
            raise ConfigError(
                f"{told} does not say by its parameters whether it is a rule of yours or written for verl: give "
                f"scoring.rules its kind, {{name: ..., kind: own}} or {{name: ..., kind: verl}}"
            )
    if fitting == ["own"]:
        return partial(_ask, partial(found, **params), "deadline" in _names(found) - params.keys())
    if fitting == ["verl"]:
        return function_judge(partial(found, **{name: as_config(value) for name, value in params.items()}))
    with_params = f" and params {', '.join(params)}" if params else ""
    raise ConfigError(
        f"{told} cannot judge an episode: write a function with the parameters ({', '.join(_OWN)}){with_params}, "
        f"verl's ({', '.join(_VERL)}), or a reward manager class with ({', '.join(_MANAGER)})"
    )


def _ask(rule: Callable[..., Any], with_deadline: bool, case: Case) -> Any:
    more = {"deadline": case.deadline} if with_deadline else {}
    return completed(rule(task=case.task, answer=case.answer, trajectory=case.trajectory, **more))


def _manager(found: type, params: Mapping[str, Any], told: str, tokenizer: LoadTokenizer | None) -> Judge:
    made_with = {name: as_config(value) for name, value in params.items()}
    if score := params.get("compute_score"):
        made_with["compute_score"] = imported(score, f"{told}: compute_score={score}")
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


def _names(function: Callable[..., Any]) -> set[str]:
    """The parameters that a function names, not those that its ** would take."""
    return set(inspect.signature(function).parameters)
