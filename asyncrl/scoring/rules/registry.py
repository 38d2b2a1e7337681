"""Rules by name: built in, or the dotted path of a function or class of yours, of any signature in KINDS or verl's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.rules.base import RuleFunction, RuleInput, RuleScores, completed, read_result
from asyncrl.scoring.rules.confined import Confinement
from asyncrl.scoring.rules.verl import as_config, verl_function, verl_manager

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


KINDS = {
    "own": ("task", "answer", "trajectory"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""The parameters of a function of each kind."""

_MANAGER = ("tokenizer", "num_examine")
_OFFERED = ("deadline", "full_answer", "confined")
"""Further parameters that the pool passes to a rule that names them; see Rule."""

LoadTokenizer = Callable[[], Any]


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
        return _adapt(getattr(module, name), setting, params)
    if "." not in name:
        raise ConfigError(
            f"{setting}: use one of {', '.join(BUILT_IN)}, or the dotted path of a function, such as "
            "my_package.rewards.score"
        )
    return _adapt(imported(name, setting), setting, params, entry.get("kind"), tokenizer)


def _adapt(
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
            return verl_function(partial(found, **as_config(params)))
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
    made_with = as_config(params)
    if score := params.get("compute_score"):
        made_with["compute_score"] = imported(score, f"{setting}: compute_score={score}")
    if tokenizer is None:

        def refuse(given: RuleInput) -> Any:
            raise ConfigError(f"{setting} was loaded without a tokenizer, only to be checked")

        return refuse
    return verl_manager(found(tokenizer=tokenizer(), num_examine=0, **made_with))


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
