"""Rewards the steps of episodes with the user's function `scoring.steps`, in separate processes.

The function's numbers take the place of the scores of a process reward model. This file has the function's contract,
the code that runs in the scorer, and the program of the processes.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from asyncrl import wire
from asyncrl.config.imports import imported
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.scoring.judge_program import Answer, failed, serve
from asyncrl.scoring.judges import JudgePool, Limits
from asyncrl.scoring.rules.base import completed, plain
from asyncrl.scoring.rules.confined import Confinement, limit_memory
from asyncrl.scoring.shaping import Scores
from asyncrl.scoring.verifier import BACKSTOP
from asyncrl.text import line_of_function, reason_of, short_repr
from asyncrl.types import LARGEST_FLOAT32, Task, Trajectory
from asyncrl.wire import Message

logger = logging.getLogger(__name__)

OFFERED = ("task", "trajectory", "texts", "answer", "full_answer", "deadline", "confined")
"""The parameters that a function may have. A function gets those that its signature names, or all if it has
`**keywords`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """The data of one episode from which the function gets its arguments.

    - `texts`: the text of each of the K steps, without special tokens
    - `answer` and `full_answer`: the answer without and with its thoughts, as rules get them
    - `deadline`: the time (of `time.monotonic`) by which the function must return
    """

    task: Task
    trajectory: Trajectory
    texts: Sequence[str]
    answer: str
    full_answer: str
    deadline: float = math.inf


class StepFunction:
    """The function at the dotted path `path`.

    Raises ConfigError: it cannot be imported, or needs a parameter that is not in OFFERED.
    """

    def __init__(self, path: str) -> None:
        setting = f"scoring.steps={path}"
        self._function = imported(path, setting)
        self._names = _parameters(self._function, setting)
        line = line_of_function(self._function)
        self._what = f"{setting} ({line})" if line else setting
        self._confinement = Confinement()

    def __call__(self, given: StepInput) -> list[float]:
        """The numbers that the function gives to the K steps of an episode. Raises ScoringError: the function raised,
        or returned something other than K finite numbers."""
        offered = {
            "task": given.task.copy(),
            "trajectory": given.trajectory.copy(),
            "texts": list(given.texts),
            "answer": given.answer,
            "full_answer": given.full_answer,
            "deadline": given.deadline,
            "confined": partial(self._confinement.score, given.deadline),
        }
        try:
            result = completed(self._function(**{name: offered[name] for name in self._names}))
            # A generator runs only now.
            values = [plain(each) for each in result] if _has_items(result) else None
        except Exception as error:
            raise ScoringError(f"{self._what} raised {reason_of(error)}") from error
        if values is None:
            raise ScoringError(
                f"{self._what} returned {short_repr(result)}; it must return a list with one number for each step"
            )
        return self._read(values, len(given.texts))

    def _read(self, values: Sequence[Any], count: int) -> list[float]:
        if len(values) != count:
            raise ScoringError(f"{self._what} returned {len(values)} numbers for {count} steps")
        for number, value in enumerate(values, 1):
            if not (isinstance(value, Real) and _is_finite(value)):
                raise ScoringError(
                    f"{self._what} returned {short_repr(value)} for step {number} of {count}; it must be a finite "
                    "float32"
                )
        return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    # A comparison with nan is false, so this also refuses nan.
    return bool(abs(value) <= LARGEST_FLOAT32)


def _parameters(function: Any, setting: str) -> list[str]:
    """The names in OFFERED that the function takes. Raises ConfigError: it needs a parameter that is not in OFFERED."""
    try:
        signature = inspect.signature(function)
        every = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        names = [name for name in OFFERED if every or name in signature.parameters]
        signature.bind(**dict.fromkeys(names))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting} cannot reward steps ({error}): write a function such as `def steps(task, trajectory, texts)`; "
            f"its parameters may be {', '.join(OFFERED)}"
        ) from error
    return names


class StepRewards:
    """Calls the function for up to `rule_processes` episodes at once. Each call may take `timeout_s` seconds and
    `rule_memory_mb` megabytes of memory.

    Raises ConfigError: the function cannot be imported, or needs a parameter that is not in OFFERED.
    """

    def __init__(self, config: ScoringConfig) -> None:
        settings = {"steps": config.steps, "timeout_s": config.timeout_s, "rule_memory_mb": config.rule_memory_mb}
        judge = f"scoring.steps={config.steps}"
        limits = Limits(judge, config.timeout_s, "scoring.timeout_s", config.rule_memory_mb)
        self._pool = JudgePool("asyncrl.scoring.step_rewards", settings, config.rule_processes, limits)

    def submit(self, given: StepInput) -> Future[Scores]:
        """Reward the K steps of an episode in the background. The future has the numbers, float32[K].

        The future raises ScoringError if the function failed, overran a limit, or ended its process, and CancelledError
        if the pool is closed first. `submit` itself raises ScoringError if the pool is closed already.
        """
        message = wire.trajectory_message(given.trajectory)
        texts = {"texts": list(given.texts), "answer": given.answer, "full_answer": given.full_answer}
        body = {**message.body, "row": wire.task_body(given.task), **texts}
        return self._pool.submit([Message("steps", 0, body, message.arrays)], _read)

    def close(self) -> None:
        """Ends the processes, even busy ones."""
        self._pool.close()


def _read(reply: Message) -> Scores:
    return np.array(reply.body["scores"], np.float32)


def _load(settings: Mapping[str, Any]) -> Answer:
    """Makes the function that answers requests in a process of the pool."""
    function = StepFunction(settings["steps"])
    limit_memory(BACKSTOP * settings["rule_memory_mb"] << 20)
    return partial(_answer, function, ErrorLogger(logger))


def _has_items(result: object) -> TypeGuard[Iterable[object]]:
    """True for a list and the like, but not for texts, mappings, sets and arrays of a single number."""
    is_one = getattr(result, "ndim", 1) == 0
    return isinstance(result, Iterable) and not is_one and not isinstance(result, str | bytes | Mapping | Set)


def _answer(
    function: Callable[[StepInput], list[float]],
    error_logger: ErrorLogger,
    messages: Sequence[Message],
    deadline: float,
) -> Message:
    (message,) = messages
    texts = {name: message.body[name] for name in ("texts", "answer", "full_answer")}
    task, trajectory = wire.read_task(message.body["row"]), wire.read_trajectory(message)
    try:
        return Message("scores", 0, {"scores": function(StepInput(task, trajectory, deadline=deadline, **texts))})
    except ScoringError as error:
        if error.__cause__ is not None:
            error_logger.exception(f"trajectory {trajectory.id}: {error}", error)
        return failed(str(error))


if __name__ == "__main__":
    serve(sys.argv[1:], _load)
