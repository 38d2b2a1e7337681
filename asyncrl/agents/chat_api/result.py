"""The result of an agent's episode: rewards, metrics, and a reward for each turn."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import AsyncrlError
from asyncrl.text import reason_of
from asyncrl.types import LARGEST_FLOAT32, Task


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result that an agent may return.

    `rewards` maps the names of the environment's rewards to their values. `metrics` has up to MAX_METRICS further
    numbers by name. `turns` has an entry for each completion, in the order of the answers: its reward, or None.
    `turns` may be empty.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    turns: Sequence[float | None] = ()


Agent = Callable[[Task, str, str], Awaitable[AgentResult | Mapping[str, float] | None]]
"""`async def agent(task, base_url, api_key)`: does the task with the chat-completions API at `base_url`.

An agent may return its environment's rewards by name, or an AgentResult. If it raises an exception, the episode fails,
and is played again.
"""

MAX_METRICS = 32
LONGEST_ERROR = 1000
"""The maximum number of characters in the reason that an agent gives for its failure."""

METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class MetricMeans:
    """Collects the metrics of agents, and gives their means."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._values[name].append(value)

    def take(self) -> dict[str, float]:
        """The mean of each metric since the last call."""
        # Each value is divided first, and the quotients are added. The sum of the values themselves may overflow.
        means = {name: sum(each / len(values) for each in values) for name, values in self._values.items()}
        self._values.clear()
        return means


class AgentError(AsyncrlError):
    """The agent failed. Its episode is not recorded as a trajectory."""


def checked(returned: object) -> AgentResult:
    """Read the value that an agent returned. Raises AgentError: it is not a valid result."""
    wanted = "numbers by name as its rewards, an AgentResult, or nothing"
    given = {} if returned is None else returned
    result = given if isinstance(given, AgentResult) else AgentResult(given)  # type: ignore[arg-type]
    return _validated(result, f"the agent returned {returned!r:.200}; it must return {wanted}")


def _validated(result: AgentResult, refusal: str) -> AgentResult:
    """Check all numbers of a result. Raises AgentError: a value is not a number (the error's text is then `refusal`),
    or a number is out of range."""
    try:
        rewards = {name: float(reward) for name, reward in result.rewards.items()}
        metrics = {name: float(value) for name, value in result.metrics.items()}
        turns = [None if reward is None else float(reward) for reward in result.turns]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise AgentError(refusal) from error
    # A comparison with nan is false, so this also refuses nan.
    if not all(abs(reward) <= LARGEST_FLOAT32 for reward in rewards.values()):
        raise AgentError(f"the agent's rewards are {rewards!s:.200}; use finite numbers, which a float32 can hold")
    if not all(reward is None or abs(reward) <= LARGEST_FLOAT32 for reward in turns):
        raise AgentError(f"the agent's rewards of turns are {turns!s:.200}; use finite numbers, or None")
    for name, value in metrics.items():
        if not (isinstance(name, str) and METRIC_NAME.fullmatch(name) and math.isfinite(value)):
            raise AgentError(
                f"the agent's metric {name!r:.100} is {value}: use a finite number, and a name of up to 64 letters, "
                "digits, _ . and -"
            )
    if len(metrics) > MAX_METRICS:
        raise AgentError(f"the agent returned {len(metrics)} metrics; at most {MAX_METRICS} are allowed")
    return AgentResult(rewards, metrics, turns)


def read_result(body: object) -> AgentResult:
    """Read a decoded JSON object, which may have `rewards`, `metrics` and `turns`. Raises AgentError: it is
    malformed."""
    if not isinstance(body, dict) or (unknown := sorted(body.keys() - {"rewards", "metrics", "turns"})):
        what = f"has {', '.join(map(str, unknown))}" if isinstance(body, dict) else "is not an object"
        raise AgentError(f"the result {what:.200}; it may have rewards, metrics and turns")
    given = {name: value for name, value in body.items() if value is not None}
    of = "rewards and metrics are objects of numbers, turns is a list of numbers and null"
    refusal = f"the result is {body!s:.200}; {of}"
    if not all(isinstance(value, (list if name == "turns" else dict)) for name, value in given.items()):
        raise AgentError(refusal)
    return _validated(AgentResult(**given), refusal)


def error_in(body: Mapping[str, object]) -> str | None:
    """The agent's reason for its failure, from the key `error` of its result. None if the agent did not fail."""
    error = body.get("error")
    if error is None or error is False:
        return None
    # The message of an exception may be empty.
    return f"{error!s:.{LONGEST_ERROR}}" or "an error without a message"


def task_body(task: Task) -> dict[str, Any]:
    """The fields of a task that are sent to an agent in another process. Raises AgentError: they cannot be written as
    JSON."""
    body = {
        **{"id": task.id, "messages": list(task.messages), "ground_truth": task.ground_truth},
        **{"data_source": task.data_source, "extra_info": dict(task.extra_info), "tools": list(task.tools)},
    }
    try:
        json.dumps(body)
    except (TypeError, ValueError) as error:
        raise AgentError(f"task {task.id} cannot be sent to an agent as JSON: {reason_of(error)}") from error
    return body
