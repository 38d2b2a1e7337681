"""Finds a rule by its name. It is the name of a built-in rule, or the dotted path of your function or of your class of
a reward manager for verl.

Your function may have the parameters of asyncrl's rules, or those of reward functions for verl or TRL.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.keys import did_you_mean
from asyncrl.config.schema import ScoringConfig
from asyncrl.config.schema.scoring import short_name
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.plain import copied
from asyncrl.sandbox.sandboxes import THIS_MACHINE, Sandbox
from asyncrl.scoring.rules.base import ACC, RuleFunction, RuleInput, RuleScores, completed, read_reason, read_result
from asyncrl.scoring.rules.confined import Confinement
from asyncrl.scoring.rules.trl import BATCH, TrlFunction, fits
from asyncrl.scoring.rules.verl import as_config, verl_function, verl_manager
from asyncrl.scoring.rules.votes import READERS, read_plainly, vote
from asyncrl.types import LARGEST_FLOAT32, Reason, Task

BUILT_IN = (
    "code",
    "environment",
    "exact_match",
    "exact_number",
    "f1",
    "format",
    "gsm8k",
    "json_schema",
    "math",
    "multiple_choice",
    "reasoning_gym",
    "tool_calls",
)
"""The rule NAME is the function NAME in rules/NAME.py. If that file has a function `prepare`, loading the rule calls
`prepare(sandbox)`, which may warn that the machine lacks something, or raise ConfigError."""


KINDS = {
    "own": ("task", "answer", "trajectory"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": BATCH,
}
"""The parameters of a function by its kind: a rule of asyncrl (own), or a reward function for verl or TRL.

A function for TRL has at least one of the parameters under `trl`, and may also have columns of the data as parameters.
"""

_MANAGER = ("tokenizer", "num_examine")
_OFFERED = ("deadline", "full_answer", "confined", "sandbox")
"""Further parameters that a rule of asyncrl may have. It gets those that its signature names; see Rule."""

LoadTokenizer = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class WeightedRule:
    """A rule, the name under which its score is reported, and the score's weight."""

    name: str
    function: RuleFunction
    weight: float = 1.0
    read: Callable[[str], object] = read_plainly
    """Finds the answer in a text, for votes, if the rule returns no `pred`."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of each data source, and `default`, the rules for all other sources. The first rule of a list that
    applies to an episode decides if the answer is right: by the rule's number `acc`, or by its score if it gives no
    `acc`."""

    default: Sequence[WeightedRule]
    by_source: Mapping[str, Sequence[WeightedRule]]

    def check(self, task: Task) -> None:
        """Raises MissingColumnError: a reward function of TRL takes a column that the task lacks."""
        for rule in self.by_source.get(task.data_source, self.default):
            if isinstance(rule.function, TrlFunction):
                rule.function.check(task)

    def score(self, given: RuleInput) -> RuleScores:
        """The scores of the task's rules.

        Raises any exception of a rule, and ScoringError: a result is malformed, or no rule applies.
        """
        rules = self.by_source.get(given.task.data_source, self.default)
        results = [rule.function(given.copy()) for rule in rules]
        scores: dict[str, float] = {}
        for rule, result in zip(rules, results, strict=True):
            score, extra = read_result(result, rule.name)
            scores |= {rule.name: score} if score is not None else {}
            scores |= {f"{rule.name}/{name}": value for name, value in extra.items()}
        applied = [index for index, rule in enumerate(rules) if rule.name in scores]
        if not applied:
            names = ", ".join(rule.name for rule in rules)
            raise ScoringError(
                f"no rule applies to task {given.task.id}: {names} returned None; one must give a reward"
            )
        first = applied[0]
        total = sum(rules[index].weight * scores[rules[index].name] for index in applied)
        said = [Reason(rule.name, read_reason(result)) for rule, result in zip(rules, results, strict=True)]
        voted = vote(results[first], rules[first].read, given.answer)
        name = rules[first].name
        outcome = scores.get(f"{name}/{ACC}", scores[name])
        return RuleScores(outcome, total, scores, voted, [each for each in said if each.text])


def load_rules(
    config: ScoringConfig, tokenizer: LoadTokenizer | None = None, sandbox: Sandbox | None = None
) -> RuleSet:
    """The rules that `scoring.rule` and `scoring.rules` name.

    verl's reward managers are made with the policy's tokenizer, which `tokenizer` loads. Without `tokenizer` they are
    checked but not made. Rules run programs in `sandbox`. Raises ConfigError: a rule is unknown or wrongly configured.
    """
    sandbox = sandbox or THIS_MACHINE
    by_source = {
        source: _read(value, f"scoring.rules.{source}", tokenizer, sandbox) for source, value in config.rules.items()
    }
    return RuleSet(_read(config.rule, "scoring.rule", tokenizer, sandbox), by_source)


def rule_names(config: ScoringConfig, data_source: str) -> str:
    """The names of the rules of a data source, as written in the configuration; empty if it has none."""
    value = config.rules.get(data_source, config.rule)
    if value is None or isinstance(value, str):
        return value or ""
    return ",".join(each if isinstance(each, str) else each["name"] for each in value)


def _read(value: Any, key: str, tokenizer: LoadTokenizer | None, sandbox: Sandbox) -> list[WeightedRule]:
    if value is None:
        return []
    if not isinstance(value, str | list) or not value:
        raise ConfigError(f"{key}={value!r}: give the name of a rule, or a list such as [{{name: gsm8k, weight: 1.0}}]")
    entries = [value] if isinstance(value, str) else value
    rules = [_rule({"name": each} if isinstance(each, str) else each, key, tokenizer, sandbox) for each in entries]
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{key} has two rules with the same name among {', '.join(names)}; rename one of them with `as`"
        )
    return rules


def _rule(entry: Any, key: str, tokenizer: LoadTokenizer | None, sandbox: Sandbox) -> WeightedRule:
    known = {"name", "as", "kind", "weight", "params"}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry.keys() <= known:
        raise ConfigError(
            f"{key} holds {entry!r:.100}; each rule is a name, or {{name: ..., weight: ..., params: ...}}, with `as` "
            "and `kind` where needed"
        )
    name, weight, alias, kind = entry["name"], entry.get("weight", 1.0), entry.get("as"), entry.get("kind")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= LARGEST_FLOAT32:
        raise ConfigError(f"{key}: the weight of {name} is {weight!r:.100}; it must be a finite number")
    if kind not in (None, *KINDS):
        raise ConfigError(f"{key}: the kind of {name} is {kind!r}; use one of {', '.join(KINDS)}")
    if alias is not None and (not isinstance(alias, str) or not alias or "/" in alias):
        raise ConfigError(f"{key}: {name} has as={alias!r}; give a name without a slash")
    found = _found(name, f"{key}={name}", sandbox)
    function = _adapt(found, f"{key}={name}", entry.get("params", {}), kind, tokenizer)
    read = READERS.get(name, read_plainly)
    return WeightedRule(alias or short_name(name), function, float(weight), read)


def _found(name: str, setting: str, sandbox: Sandbox) -> Any:
    if name in BUILT_IN:
        module = importlib.import_module(f"asyncrl.scoring.rules.{name}")
        if hasattr(module, "prepare"):
            module.prepare(sandbox)
        return getattr(module, name)
    refuse_unknown(name, setting)
    return imported(name, setting)


def refuse_unknown(name: str, setting: str) -> None:
    """Raises ConfigError: `name`, as `setting` gives it, is neither a built-in rule nor a path. Nothing is imported."""
    if name not in BUILT_IN and "." not in name:
        raise ConfigError(
            f"{setting}: use one of {', '.join(BUILT_IN)}, or the dotted path of a function, such as "
            f"my_package.rewards.score, or FILE.py:NAME{did_you_mean(name, BUILT_IN)}"
        )


def _adapt(
    found: Any, setting: str, params: Mapping[str, Any], kind: str | None, tokenizer: LoadTokenizer | None
) -> RuleFunction:
    """`found` with its `params` bound. `setting` is its configuration entry, such as `scoring.rule=my.rule`.
    `kind`, one of KINDS, decides for functions whose parameters fit several kinds. Reward managers need `tokenizer`.

    Raises ConfigError: `found` has none of the known signatures, or it fits several kinds and `kind` is None.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        signature = inspect.Signature()

    def takes(parameters: Sequence[str]) -> bool:
        try:
            signature.bind(**dict.fromkeys(parameters), **params)
        except TypeError:
            return False
        return True

    if isinstance(found, type) and takes(_MANAGER):
        return _adapt_manager(found, params, setting, tokenizer)
    named = signature.parameters.keys()
    offered = [name for name in _OFFERED if name in named - params.keys()]
    takes_all = {"own": takes([*KINDS["own"], *offered]), "verl": takes(KINDS["verl"]), "trl": fits(signature)}
    kinds = [each for each in KINDS if takes_all[each] and kind in (None, each)]
    if len(kinds) > 1:
        # A function with ** takes the parameters of all kinds, so the parameters that it names decide.
        kinds = [each for each in kinds if named & set(KINDS[each])]
        if len(kinds) != 1:
            raise ConfigError(
                f"{setting} has parameters that fit several kinds of function: give its kind in scoring.rules, as "
                "[{name: ..., kind: own}] for a rule of asyncrl, or with kind: verl or kind: trl"
            )
    match kinds:
        case ["own"]:
            return _adapt_own(lambda **given: found(**given, **copied(dict(params))), offered)
        case ["verl"]:
            return verl_function(lambda **given: found(**given, **as_config(params)))
        case ["trl"]:
            return TrlFunction(setting.partition("=")[2], found, params)
    own, verl, trl = map(", ".join, KINDS.values())
    with_params = f" and params {', '.join(params)}" if params else ""
    raise ConfigError(
        f"{setting} cannot judge an episode: write a function with the parameters ({own}){with_params}, "
        f"verl's ({verl}), some of TRL's ({trl}), or a reward manager class with ({', '.join(_MANAGER)})"
    )


def _adapt_own(rule: Callable[..., Any], names: Sequence[str]) -> RuleFunction:
    confinement = Confinement()

    def score(given: RuleInput) -> Any:
        confined = partial(confinement.score, given.deadline)
        offered = {
            "deadline": given.deadline,
            "full_answer": given.full_answer,
            "confined": confined,
            "sandbox": given.sandbox,
        }
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
