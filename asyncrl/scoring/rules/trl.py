"""Reward functions written for TRL's GRPOTrainer, used unchanged.

A function takes the lists `prompts`, `completions` and `completion_ids`, and each column of the data as a further list.
It returns a list of rewards. None in this list means that the function does not apply to a completion. Here each call
has one episode, so every list has one element.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.plain import copied
from asyncrl.scoring.answers import prompt_and_response
from asyncrl.scoring.rules.base import REASON, SKIPPED, RuleInput, completed, plain
from asyncrl.text import line_of_function, message_of, reason_of, short_repr
from asyncrl.types import LARGEST_FLOAT32, TEXT_PROMPT, Role, Task, ToolCall

BATCH = ("prompts", "completions", "completion_ids")
"""A function that has one of these parameters is taken for a reward function for TRL."""
_SERVICES = ("trainer_state", "log_extra", "log_metric")
_ELSEWHERE = "environments"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state that reward functions get: two fields of `transformers.TrainerState`.

    `global_step` is the learner step whose policy played the episode, and `max_steps` the last learner step of the run.
    """

    global_step: int
    max_steps: int


@dataclass
class _Log:
    """The texts and numbers that a function logs about one episode."""

    texts: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.texts += [f"{column}: {value}" for value in values]

    def metric(self, name: str, value: float) -> None:
        if name in ("score", REASON):
            raise ValueError(f"log_metric cannot use the name {name}, which a rule's result has already")
        self.numbers[name] = value


def fits(signature: inspect.Signature) -> bool:
    """True if a function of this signature may be a reward function for TRL."""
    parameters = signature.parameters.values()
    return any(each.name in BATCH or each.kind is each.VAR_KEYWORD for each in parameters)


class MissingColumnError(ScoringError):
    """The reward function `function` takes the columns `missing`, which a task lacks. The task has `columns`."""

    def __init__(self, function: str, missing: Sequence[str], task: Task, columns: Sequence[str]) -> None:
        super().__init__(
            f"{function} takes {', '.join(missing)}, which task {task.id} lacks. The task has {', '.join(columns)}. "
            "Name the missing column in data.columns (docs/trl.md), or give the parameter a default value"
        )
        self.function, self.missing, self.columns = function, missing, columns


class TrlFunction:
    """The rule that calls `reward`, whose dotted path is `name`, with `params` as further keywords.

    Raises ConfigError: the function needs TRL's `environments`.
    """

    def __init__(self, name: str, reward: Callable[..., Any], params: Mapping[str, Any]) -> None:
        self._name, self._reward, self._params = name, reward, params
        line = line_of_function(reward)
        self._place = f" ({line})" if line else ""
        parameters = inspect.signature(reward).parameters
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._names = set(parameters)
        self._required = [
            each.name
            for each in parameters.values()
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        if _ELSEWHERE in self._required:
            raise ConfigError(
                f"{name} takes `{_ELSEWHERE}`, which live in actors, not in scorers; let the environment give the "
                "reward (docs/environments.md)"
            )

    def check(self, task: Task) -> None:
        """Raises MissingColumnError: the function takes a column that the task lacks."""
        columns = _columns(task)
        if missing := [each for each in self._required if each not in (*BATCH, *_SERVICES, *columns, *self._params)]:
            raise MissingColumnError(self._name, missing, task, sorted(columns))

    def __call__(self, given: RuleInput) -> Any:
        """The reward of one episode.

        Raises ScoringError, which names the function and the task: the task lacks a column, the function raised an
        error, or its result is not a list with exactly one reward. The message for a wrong result has the line that
        defines the function.
        """
        log, task = _Log(), given.task
        self.check(task)
        offered = {**_columns(task), **_batch(given), **_services(given, log), **copied(dict(self._params))}
        try:
            known = {each: value for each, value in offered.items() if self._takes_all or each in self._names}
            result = completed(self._reward(**known))
        except Exception as error:
            form = "a text, like the prompt in the data file" if _is_text(task) else "a list of messages"
            raise ScoringError(
                f"{self._name} raised {reason_of(error)}, at task {task.id}; its completion is {form}"
            ) from error
        try:
            one = _only(result)
        except ValueError as error:
            raise ScoringError(f"{self._name}, at task {task.id}, returned {error}{self._place}") from error
        return {**log.numbers, "score": SKIPPED if one is None else one, REASON: "\n".join(log.texts)}


def _only(result: Any) -> Any:
    """The only reward in a function's result: a list, or anything else that has an order and a length, such as an array
    or a series. Raises ValueError: its text completes the sentence `NAME returned ...`."""
    form = "it must return a list with a reward for each completion"
    if isinstance(result, str | bytes | Mapping | Set) or not hasattr(result, "__len__"):
        raise ValueError(f"{short_repr(result)}; {form}")
    try:
        rewards = list(result)
    except Exception as error:
        raise ValueError(
            f"{short_repr(result)}, which cannot be read as a list ({message_of(error)}); {form}"
        ) from error
    if len(rewards) != 1:
        raise ValueError(f"{len(rewards)} rewards for 1 completion")
    one = plain(rewards[0])
    if one is not None and not (isinstance(one, Real) and abs(one) <= LARGEST_FLOAT32):  # type: ignore[operator]
        raise ValueError(
            f"the reward {short_repr(one)}; a reward is a number of at most {LARGEST_FLOAT32:.1e}, or None if the "
            "function does not apply"
        )
    return one


def _columns(task: Task) -> dict[str, list[Any]]:
    """The columns of a task: those of its row, and the fields of its `extra_info`."""
    row = {
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "reward_model": {"ground_truth": copied(task.ground_truth)},
        "extra_info": copied(dict(task.extra_info)),
    }
    fields = {name: value for name, value in task.extra_info.items() if name != TEXT_PROMPT}
    return {name: [value] for name, value in (row | fields).items()}


def _batch(given: RuleInput) -> dict[str, list[Any]]:
    task, trajectory = given.task, given.trajectory
    _, start = prompt_and_response(trajectory)
    is_text = _is_text(task)
    return {
        "prompts": [task.messages[0]["content"] if is_text else [dict(each) for each in task.messages]],
        "completions": [given.response if is_text else _messages(given, start)],
        "completion_ids": [trajectory.tokens[start:].tolist()],
    }


def _is_text(task: Task) -> bool:
    """True if the prompt is a text in the data file, and no system message was added to it."""
    return task.extra_info.get(TEXT_PROMPT) is True and len(task.messages) == 1


def _messages(given: RuleInput, start: int) -> list[dict[str, Any]]:
    turns = [turn for turn in given.trajectory.turns if turn.start >= start]
    return [
        {"role": "assistant" if turn.role is Role.ASSISTANT else "tool", "content": text, **_calls(turn.tool_calls)}
        for turn, text in zip(turns, given.turn_texts, strict=True)
    ]


def _calls(calls: Sequence[ToolCall]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}} for each in calls]
    return {"tool_calls": made} if made else {}


def _services(given: RuleInput, log: _Log) -> dict[str, Any]:
    state = TrainerState(given.progress.step, given.progress.steps)
    return dict(zip(_SERVICES, (state, log.extra, log.metric), strict=True))
