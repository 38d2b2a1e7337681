"""The answer is the ground truth's mathematical object, judged by math-verify (the extra asyncrl[math])."""

from __future__ import annotations

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.types import Task, Trajectory

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError("the rule math needs the extra: pip install 'asyncrl[math]'") from error


def math(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer's last expression (boxed ones first) equals the ground truth's, else 0.

    math-verify's own time limits are off, for it calls an expression wrong that it had no time for: here
    `scoring.timeout_s` makes that a failure.

    Raises ScoringError: there is no expression in the ground truth.
    """
    truth = (
        task.ground_truth if "$" in task.ground_truth or "\\boxed" in task.ground_truth else f"${task.ground_truth}$"
    )
    gold = parse(truth, parsing_timeout=None)
    if not gold:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} of task {task.id} holds no expression")
    return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))
