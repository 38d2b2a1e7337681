"""Finds the code of the user's own that a run calls, and where it is defined."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.schema import ActorConfig, ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND, ScoringModelConfig, needs, short_name
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight.episodes.made_up import made_up_arguments
from asyncrl.text import line_of
from asyncrl.types import Task


@dataclass(frozen=True)
class OwnCode:
    """The code that the user has written and that episodes run.

    - `tools`: the own tools by name, and `environments`: the own environments by the name that tasks use. A value is
      the place of the definition, such as ` (my_tools.py, line 3)`
    - `others`: true if simulated users, or the function that splits episodes into steps, are the user's own
    """

    tools: Mapping[str, str]
    environments: Mapping[str, str]
    others: bool

    @classmethod
    def of(cls, actor: ActorConfig) -> OwnCode:
        """Raises ConfigError: a tool or an environment cannot be used."""
        from asyncrl.tools.environments.classes import environment_classes
        from asyncrl.tools.registry import tool_classes

        tools = {} if actor.has_environments else tool_classes(actor)
        environments = {name: each.make for name, each in environment_classes(actor).items()}
        return cls(_places(tools), _places(environments), bool(actor.interactions) or "." in str(actor.step_split))

    @property
    def any(self) -> bool:
        return bool(self.tools) or bool(self.environments) or self.others

    def calls(self, functions: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A call of each function that is the user's own and for which arguments can be made up."""
        chosen = {name: each for name, each in functions.items() if self.environments or name in self.tools}
        made = {name: made_up_arguments(each) for name, each in chosen.items()}
        return [{"name": name, "arguments": each} for name, each in made.items() if each is not None]

    def opened(self) -> str:
        """The code that begins an episode, as messages name it."""
        if self.environments:
            return f"`reset` of {self._environment()}"
        named = ", ".join(f"{name}{place}" for name, place in self.tools.items())
        return f"`create` of {named}" if named else "your own code"

    def called(self, tool: str) -> str:
        """A tool as messages name it."""
        if self.environments:
            return f"the tool {tool} of {self._environment()}"
        return f"the tool {tool}{self.tools.get(tool, '')}"

    def _environment(self) -> str:
        return "the environment" + " or".join(f"{name and ' '}{name}{each}" for name, each in self.environments.items())


def own_paths(actor: ActorConfig, scoring: ScoringConfig) -> list[str]:
    """The dotted paths of the user's own code that a start tries, as the configuration names them. Nothing is
    imported."""
    if actor.played_by:
        return []
    users = [each if isinstance(each, str) else each.get("class_name") for each in actor.interactions.values()]
    play = [*actor.tools, actor.environment, *actor.environments.values(), actor.step_split, *users]
    rules = chain.from_iterable(map(_names, (scoring.rule, *scoring.rules.values())))
    manager = scoring.manager
    models = [each.family for each in (scoring.prm, scoring.outcome_model) if _is_light(each)]
    named = [*play, *rules, scoring.steps, manager.name, manager.compute_score, *models]
    return [each for each in named if isinstance(each, str) and "." in each and not each.startswith("asyncrl.")]


def _names(rules: Any) -> list[Any]:
    """The names in a value of `scoring.rule`, which another check refuses if it is malformed."""
    entries = rules if isinstance(rules, list) else [rules]
    return [each.get("name") if isinstance(each, dict) else each for each in entries]


def own_scorers(scoring: ScoringConfig, task: Task) -> dict[str, str]:
    """The user's own code that scores the task, by the kind of its scores. A value is the key and the place of the
    code, as messages show them.

    A model is left out if `path` names one, or if it runs on a GPU, because loading it may take long.
    """
    wanted, found = needs(scoring, task.data_source), dict[str, str]()
    if "rules" in wanted and (names := own_rules(scoring, task)):
        found["rules"] = f"scoring.rule: {', '.join(map(with_place, names.values()))}"
    if "steps" in wanted and scoring.steps is not None:
        found["steps"] = f"scoring.steps: {with_place(scoring.steps)}"
    models = {"prm": scoring.prm, "outcome_model": scoring.outcome_model}
    for kind, model in models.items():
        if kind in wanted and _is_light(model):
            found[kind] = f"scoring.{kind}.family: {with_place(model.family)}"
    manager = scoring.manager.of(task.data_source)
    if GROUP_KIND in wanted and manager is not None:
        named = (manager["name"] if "." in manager["name"] else None, manager["compute_score"])
        if own := [with_place(each) for each in named if each]:
            found[GROUP_KIND] = f"scoring.manager: {', '.join(own)}"
    return found


def own_rules(scoring: ScoringConfig, task: Task) -> dict[str, str]:
    """The dotted paths of the task's rules that the user has written, by the names under which they report scores."""
    from asyncrl.scoring.rules.registry import BUILT_IN

    rule = scoring.rules.get(task.data_source, scoring.rule)
    entries = rule if isinstance(rule, list) else [] if rule is None else [rule]
    given = [{"name": each} if isinstance(each, str) else each for each in entries]
    return {each.get("as") or short_name(each["name"]): each["name"] for each in given if each["name"] not in BUILT_IN}


def _is_light(model: ScoringModelConfig) -> bool:
    return "." in model.family and model.path is None and model.device == "cpu"


def _places(named: Mapping[str, Any]) -> dict[str, str]:
    return {name: _place(each) for name, each in named.items() if _is_own(each)}


def _is_own(code: Any) -> bool:
    return not str(getattr(code, "__module__", "")).startswith("asyncrl.")


def with_place(path: str) -> str:
    """The dotted path of a class or function, with the line of its definition."""
    try:
        return f"{path}{_place(imported(path, path))}"
    except ConfigError:
        return path


def _place(code: Any) -> str:
    """The file and line of a class or function, in brackets after a space. Empty if it has no source."""
    try:
        found = inspect.unwrap(code)
        return f" ({line_of(inspect.getfile(found), inspect.getsourcelines(found)[1])})"
    except (TypeError, OSError):
        return ""
