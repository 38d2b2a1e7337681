"""Translates the keys of TRL for rewards, tools and environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.compat.rows import Row, Setting, made, none, used
from asyncrl.compat.trl.source import TrlConfig
from asyncrl.compat.trl.values import Named, Unread

THOUGHTS = r"^<think>(?!.*<think>).*?</think>.*$"
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "accuracy_reward": {"name": "math", "as": "accuracy_reward"},
    "reasoning_accuracy_reward": {"name": "math", "as": "reasoning_accuracy_reward"},
    "think_format_reward": {
        "name": "format",
        "as": "think_format_reward",
        "params": {"pattern": f"(?s){THOUGHTS}", "thoughts": True},
    },
}
"""Maps reward functions that TRL ships to rules of asyncrl."""
REWARDS = frozenset(("get_reward", "get_call_reward"))
"""The methods by which an environment rewards an episode or a call."""
OVERLONG = "get_soft_overlong_punishment"
MODEL = "reward_model_name_or_path"
PLACEHOLDER = "MODULE.FUNCTION"
"""The value of `scoring.rule` if no rule is known. A run refuses it. Without it, a run would use the default rule."""


@dataclass(frozen=True)
class Model:
    """A reward model: a folder or a name on the hub."""

    path: str


def rewards(source: TrlConfig) -> list[Any]:
    """The reward functions and models, in the order in which TRL weighs them."""
    given = source["reward_funcs"]
    listed = given if isinstance(given, list) else [] if given is None else [given]
    models = [Model(source[MODEL])] if source[MODEL] else []
    return [*models, *(Model(each) if _is_model(each) else each for each in listed)]


def _is_model(given: Any) -> bool:
    return isinstance(given, str) and given not in (*SHIPPED, OVERLONG) and ("/" in given or "." not in given)


def score_name(given: Any) -> str:
    """The name under which the score of a function or model is in the labels."""
    return "outcome_model" if isinstance(given, Model) else f"rule/{rule_name(given)}"


def rule_name(given: Any) -> str:
    """The name under which the function reports its score. A function that cannot be read is named by its source
    text."""
    if isinstance(given, Unread):
        return given.text
    return str(given.path if isinstance(given, Named) else given).rpartition(".")[2]


def _rules(source: TrlConfig) -> Iterator[Setting | str]:
    given = rewards(source)
    weights = source["reward_weights"] or [1.0] * len(given)
    if len(weights) != len(given):
        yield f"reward_weights={weights}: there are {len(given)} reward functions, so every weight is 1"
        weights = [1.0] * len(given)
    rules: list[dict[str, Any]] = []
    models: list[tuple[str, float]] = []
    for each, weight in zip(given, weights, strict=True):
        if isinstance(each, Model):
            models.append((each.path, weight))
            continue
        name = rule_name(each)
        path = each.path if isinstance(each, Named) else each if isinstance(each, str) else ""
        if name == OVERLONG:
            yield "algorithm.reward", [{"name": "overlong", "params": {"max_length": 1280, "buffer": 256}}]
        elif name in SHIPPED and (path == name or path.startswith("trl.rewards")):
            rules.append({**SHIPPED[name], "weight": weight})
        elif path:
            rules.append({"name": path, "weight": weight})
        else:
            yield (
                f"reward_funcs: {name} is left out: write it as a function in a module, and add "
                f"{{name: {PLACEHOLDER}, weight: {weight}}} to scoring.rule"
            )
    yield from _models(models)
    if rules:
        yield "scoring.rule", rules[0]["name"] if rules == [{"name": rules[0]["name"], "weight": 1.0}] else rules
        if _may_reward(source["environment_factory"]):
            yield "scoring.shaping.environment_weight", 1.0
    else:
        yield from _without_rules(source, bool(models))


def _may_reward(environments: Any) -> bool:
    """False if there are no environments, or if their classes are known to give no rewards."""
    if isinstance(environments, Mapping):
        return any(map(_may_reward, environments.values()))
    names = environments.names if isinstance(environments, Named) else None
    return environments is not None and (names is None or bool(names & REWARDS))


def _without_rules(source: TrlConfig, has_model: bool) -> Iterator[Setting | str]:
    """The settings that keep the default rule out of the reward."""
    if _may_reward(source["environment_factory"]):
        yield "scoring.rule", "environment"
    elif has_model:
        yield "scoring.rule", None
    else:
        yield "scoring.rule", PLACEHOLDER
        yield (
            f"reward_funcs: no function is known, and a run refuses scoring.rule={PLACEHOLDER}: write your function's "
            "dotted path there, such as scoring.rule=my_rewards.correct, or a built-in rule (docs/scoring.md)"
        )


def _models(given: Sequence[tuple[str, float]]) -> Iterator[Setting | str]:
    """The first reward model with its weight, and a remark on each further one."""
    for path, weight in given[:1]:
        yield "scoring.outcome_model.family", "sequence_classifier"
        yield "scoring.outcome_model.path", path
        if weight != 1.0:
            yield "scoring.shaping.outcome_model_weight", weight
        if weight < 0:
            yield f"reward_weights: the model {path} has the weight {weight}, and a run refuses a negative one"
    for path, weight in given[1:]:
        yield (
            f"reward_funcs: the model {path} is left out, since scoring.outcome_model is one model: write a reward "
            f"function that asks it, and add {{name: {PLACEHOLDER}, weight: {weight}}} to scoring.rule"
        )


def _environment(source: TrlConfig) -> Iterator[Setting | str]:
    given = source["environment_factory"]
    if isinstance(given, Named):
        yield "actor.environment", given.path
    elif isinstance(given, Mapping):
        yield "actor.environments", {name: each.path for name, each in given.items() if isinstance(each, Named)}
    elif given is not None:
        yield "environment_factory: no class is named; set actor.environment to the dotted path of a class"


def _turns(source: TrlConfig) -> Iterator[Setting | str]:
    if source["max_tool_calling_iterations"] is not None:
        # One more turn, since the policy answers after the last turn with calls.
        yield "actor.max_turns", source["max_tool_calling_iterations"] + 1


def _tools(source: TrlConfig) -> Iterator[Setting | str]:
    has_environment = source["environment_factory"] is not None
    if not has_environment:  # The methods of an environment replace actor.tools.
        yield "actor.tools", []
    if source["tools"] and has_environment:
        yield f"tools={_names(source['tools'])}: make them methods of the environment"
    elif source["tools"]:
        yield (
            f"tools={_names(source['tools'])}: asyncrl takes no plain functions, so actor.tools is empty: make them "
            "methods of a class, and name it in actor.environment (docs/environments.md), or write a Tool class for "
            "each, and name these in actor.tools (docs/tools.md)"
        )
    elif not has_environment:
        yield "no tools are given: actor.tools=[] leaves out asyncrl's default, the calculator"


def _names(given: Any) -> str:
    return ", ".join(map(rule_name, given if isinstance(given, list) else [given]))


ROWS: tuple[Row, ...] = (
    made(
        "reward_funcs",
        "`scoring.rule`",
        None,
        "The functions as they are, by dotted path ([Reward functions](#reward-functions)). `accuracy_reward` becomes "
        "the rule `math`, and `think_format_reward` the rule `format`. A model becomes `scoring.outcome_model`; "
        "further ones are left out, and the report names them. A function without an importable name, such as a "
        "lambda, is left out, and the report lists it. If no function is left, `scoring.rule` is `environment` if an "
        "environment may give rewards, and null if only a model gives them. With neither, it is `MODULE.FUNCTION`, "
        "which is not a function, so that a run refuses it.",
        _rules,
    ),
    used(
        "reward_weights",
        "`scoring.rule`, `scoring.shaping.outcome_model_weight`",
        None,
        "The `weight` of each function, and `outcome_model_weight` of the model; null means 1.",
    ),
    used(MODEL, "`scoring.outcome_model.path`", None, "A sequence classifier with one label."),
    made(
        "environment_factory",
        "`actor.environment`, `actor.environments`",
        None,
        "The dotted path of the class, or of each class of a mapping ([environments.md](environments.md)).",
        _environment,
    ),
    made(
        "tools",
        "`actor.tools`",
        None,
        "Empty, since asyncrl takes no plain functions. The report lists the functions. Make each a method of a class, "
        "which `actor.environment` names, or write a [Tool](tools.md#writing-a-tool) for it.",
        _tools,
    ),
    made(
        "max_tool_calling_iterations", "`actor.max_turns`", None, "One more than this number, for the answer.", _turns
    ),
    none("", "rollout_func", "Write an agent, and name it in `actor.agent` ([agents.md](agents.md))."),
    none("", "reward_processing_classes", "`scoring.outcome_model` reads the tokenizer of the model's folder."),
    none("", "callbacks", "The console, `observe.sinks` and the dashboard show a run."),
)
