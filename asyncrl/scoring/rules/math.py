"""The answer means the same as the ground truth, compared by math-verify (the extra asyncrl[math])."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.confined import Confined
from asyncrl.scoring.rules.text import boxes, tagged
from asyncrl.types import Task, Trajectory

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError("the rule math needs the extra: pip install 'asyncrl[math]'") from error

_JOINED = re.compile(r"[\s$,;\\()\[\]]{0,20}(?:\\text\s?\{\s?)?(?:and|or)?[\s$,;\\()\[\]}]{0,20}")
"""The text that may separate boxes of one answer."""

_EASY = "17"
"""An answer that can be compared with every usable ground truth."""


def math(
    task: Task, answer: str, trajectory: Trajectory, *, confined: Confined, cpu_s: float = 2.0
) -> Mapping[str, float]:
    """`score` is 1 if the answer's last expression (boxed ones first) equals the ground truth's, else 0. Boxes that
    only commas, "and" or "or" separate are one answer; otherwise the last box counts. If the answer takes over `cpu_s`
    seconds of processor time or too much memory, `score` is 0 and `out_of_time` or `out_of_memory` is 1. math-verify's
    own time limits are off, because they make an expression wrong that was only slow.

    Raises ScoringError: the ground truth has no expression, or takes too much time itself.
    """

    scores = confined(_expressions, _equal, task.ground_truth, answer, cpu_s)
    if scores["out_of_time"] and confined(_expressions, _equal, task.ground_truth, _EASY, cpu_s)["out_of_time"]:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} cannot even be compared with a number in time")
    return scores


def _expressions(truth: str) -> list[Any]:
    found = parse(truth if "$" in truth or "\\boxed" in truth else f"${truth}$", parsing_timeout=None)
    if not found:
        raise ScoringError(f"the ground truth {truth!r:.100} holds no expression")
    return list(found)


def _equal(truth: list[Any], answer: str) -> float:
    return float(verify(truth, parse(_final(answer), parsing_timeout=None), timeout_seconds=None))


def _final(answer: str) -> str:
    """The boxes with which the answer ends, or the content of its answer tag."""
    inside = tagged(answer)
    found = boxes(inside)
    if not found:
        return inside
    last = [found[-1]]
    for before, after in reversed(list(pairwise(found))):
        if not _JOINED.fullmatch(inside, before.end, after.start):
            break
        last.insert(0, before)
    return ", ".join(f"\\boxed{{{each.content}}}" for each in last) if len(last) > 1 else inside[last[0].start :]
