"""Rules by name: built in, or the dotted path of a function or class of yours."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.adapters import KINDS, LoadTokenizer, adapt
from asyncrl.scoring.rules.base import RuleFunction, RuleInput, RuleScores, read_result

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
"""The rule NAME is the function NAME in rules/NAME.py. If that file has a function `prepare`, loading the rule calls
it, so that it can warn of something that the machine lacks."""


@dataclass(frozen=True, slots=True)
class WeightedRule:
    """A rule, the name under which its score is reported, and the score's weight."""

    name: str
    function: RuleFunction
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of each data source, and the rules of all other sources. The first of a list decides whether an answer
    is right."""

    default: Sequence[WeightedRule]
    by_source: Mapping[str, Sequence[WeightedRule]]

    def score(self, given: RuleInput) -> RuleScores:
        """The scores of the task's rules. Raises what a rule raises, and ScoringError for a malformed result."""
        scores: dict[str, float] = {}
        rules = self.by_source.get(given.task.data_source, self.default)
        for rule in rules:
            scores[rule.name], extra = read_result(rule.function(given))
            scores.update({f"{rule.name}/{name}": value for name, value in extra.items()})
        total = sum(rule.weight * scores[rule.name] for rule in rules)
        return RuleScores(scores[rules[0].name], total, scores)


def load_rules(config: ScoringConfig, tokenizer: LoadTokenizer | None = None) -> RuleSet:
    """The rules that `scoring.rule` and `scoring.rules` name.

    verl's reward managers are made with the policy's tokenizer, which `tokenizer` loads. Without it they are checked
    but not made. Raises ConfigError: the message says how to mend it.
    """
    by_source = {source: _read(value, f"scoring.rules.{source}", tokenizer) for source, value in config.rules.items()}
    return RuleSet(_read(config.rule, "scoring.rule", tokenizer), by_source)


def rule_names(config: ScoringConfig, data_source: str) -> str:
    """The names of the rules of a data source, as written in the configuration."""
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
        raise ConfigError(f"{key}: {name} has as={alias!r}; give a name without a slash")
    return entry


def _resolve(entry: Mapping[str, Any], key: str, tokenizer: LoadTokenizer | None) -> RuleFunction:
    name, params, setting = entry["name"], entry.get("params", {}), f"{key}={entry['name']}"
    if name in BUILT_IN:
        module = importlib.import_module(f"asyncrl.scoring.rules.{name}")
        if hasattr(module, "prepare"):
            module.prepare()
        return adapt(getattr(module, name), setting, params)
    if "." not in name:
        raise ConfigError(
            f"{setting}: use one of {', '.join(BUILT_IN)}, or the dotted path of a function, such as "
            "my_package.rewards.score"
        )
    return adapt(imported(name, setting), setting, params, entry.get("kind"), tokenizer)
