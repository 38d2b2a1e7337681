"""The answer is the ground truth's mathematical object, judged by math-verify (the extra asyncrl[math])."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.confined import Confinement
from asyncrl.scoring.rules.text import boxes, tagged
from asyncrl.types import Task, Trajectory

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError("the rule math needs the extra: pip install 'asyncrl[math]'") from error

_JOINED = re.compile(r"[\s$,;\\()\[\]]{0,20}(?:\\text\s?\{\s?)?(?:and|or)?[\s$,;\\()\[\]}]{0,20}")
"""What may stand between boxes that are one answer."""

_EASY = "17"
"""An answer that every ground truth of use can be compared with."""


def math(
    task: Task,
    answer: str,
    trajectory: Trajectory,
    *,
    confinement: Confinement,
    deadline: float,
    cpu_s: float = 2.0,
) -> Mapping[str, float]:
    """`score` is 1 where the answer's last expression (boxed ones first) equals the ground truth's, else 0. Several
    boxes are one answer where nothing but commas, "and" or "or" parts them; else the last one counts. An answer that
    takes over `cpu_s` seconds of the processor or too much memory scores 0, with `out_of_time` or `out_of_memory` 1.
    math-verify's own time limits are off, for it cannot tell a wrong expression from one that it had no time for.

    Raises ScoringError: there is no expression in the ground truth, or it takes too much time itself.
    """

    def judge(text: str) -> Mapping[str, float]:
        return confinement.judge(_expressions, _equal, task.ground_truth, text, cpu_s, deadline)

    verdict = judge(answer)
    if verdict["out_of_time"] and judge(_EASY)["out_of_time"]:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} cannot even be compared with a number in time")
    return verdict


def _expressions(truth: str) -> list[Any]:
    found = parse(truth if "$" in truth or "\\boxed" in truth else f"${truth}$", parsing_timeout=None)
    if not found:
        raise ScoringError(f"the ground truth {truth!r:.100} holds no expression")
    return list(found)


def _equal(truth: list[Any], answer: str) -> float:
    return float(verify(truth, parse(_final(answer), parsing_timeout=None), timeout_seconds=None))


def _final(answer: str) -> str:
    """The answer from the boxes on that it ends with, or what its answer tag holds."""
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
