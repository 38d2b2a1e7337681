"""Rules by name: built in, or the dotted path of a function or class of yours."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.adapters import KINDS, LoadTokenizer, as_judge
from asyncrl.scoring.rules.base import Case, Judge, Verdict, read_result

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
"""The rule NAME is the function NAME in rules/NAME.py. A function `prepare` there warns of what the machine lacks."""


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
        name = fields.get("as") or fields["name"].rpartition(".")[2]
        rules.append(WeightedRule(name, _resolve(fields, key, tokenizer), float(fields.get("weight", 1.0))))
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
    if entry.get("kind") not in (None, *KINDS):
        raise ConfigError(f"{key}: the kind of {name} is {entry['kind']!r}; use one of {', '.join(KINDS)}")
    if alias is not None and (not isinstance(alias, str) or not alias or "/" in alias):
        raise ConfigError(f"{key}: {name} is to be told as {alias!r}; give a name without a slash")
    return entry


def _resolve(entry: Mapping[str, Any], key: str, tokenizer: LoadTokenizer | None) -> Judge:
    name, params = entry["name"], entry.get("params", {})
    if name in BUILT_IN:
        module = importlib.import_module(f"asyncrl.scoring.rules.{name}")
        if hasattr(module, "prepare"):
            module.prepare()
        return as_judge(getattr(module, name), f"{key}={name}", params)
    if "." not in name:
        raise ConfigError(
            f"{key}={name}: use one of {', '.join(BUILT_IN)}, or the dotted path of a function, such as "
            "my_package.rewards.score"
        )
    return as_judge(imported(name, f"{key}={name}"), f"{key}={name}", params, entry.get("kind"), tokenizer)
