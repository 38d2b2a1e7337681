r"""The answer means the same as the ground truth, compared by math-verify (needs the extra asyncrl[math]).

In both texts, currencies, percent signs and thin spaces are read as the rule `exact_number` reads them. A dollar sign
for money is dropped (`\$5` is 5). A percent sign is a unit: `5\%` is 5, not 0.05. Thin spaces and `{,}` separate
thousands (`32,\!348`, `32\,348`) only before groups of three digits.
"""

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
    raise ConfigError(f"the rule math needs the extra: pip install 'asyncrl[math]' ({error})") from error

_JOINED = re.compile(r"[\s$,;\\()\[\]]{0,20}(?:\\text\s?\{\s?)?(?:and|or)?[\s$,;\\()\[\]}]{0,20}")
"""The text that may separate the boxes of one answer."""

_THIN = r"(?:\\[,;: ]|~|[\u00a0\u2006-\u200a\u202f])"
_DIGITS = r"(?<![0-9.,/])[0-9]{{1,3}}(?:{0}[0-9]{{3}}){{1,20}}(?![0-9/,])"
_GROUPED = re.compile(_DIGITS.format(_THIN))
_SPACED = re.compile(_DIGITS.format(f"(?:{_THIN}| )"))
_PLAIN = (
    (re.compile(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?:\b(?:US|AU|CA|HK|NZ)\s?)?(?:\\(?:text|mbox|mathrm)\s?\{\s?\\\$\s?\}|(?<!\\)\\\$)\s?"), ""),
    (re.compile(r"(?<=[0-9A-Za-z)\]}])(?:\s|\\[,;: ])?\\?[%％](?!\s?[0-9(])"), ""),
)
_NO_DIGITS = re.compile("[^0-9]")

_EASY = "17"
"""An answer that is quickly compared with every usable ground truth."""


def math(
    task: Task, answer: str, trajectory: Trajectory, *, confined: Confined, cpu_s: float = 2.0
) -> Mapping[str, float]:
    """`score` is 1 if the answer's last boxed expression, or without a box its last expression, equals the ground
    truth's, else 0. Boxes separated only by commas, "and" or "or" are one answer. If the answer takes over `cpu_s`
    seconds of processor time or too much memory, `score` is 0 and `out_of_time` or `out_of_memory` is 1. math-verify's
    own time limits are off, because they count a slow comparison as a wrong answer.

    Raises ScoringError: the ground truth has no expression, or takes too much time itself.
    """

    scores = confined(_expressions, _equal, task.truth_text, answer, cpu_s)
    if scores["out_of_time"] and confined(_expressions, _equal, task.truth_text, _EASY, cpu_s)["out_of_time"]:
        raise ScoringError(f"the ground truth {task.truth_text!r:.100} cannot even be compared with a number in time")
    return scores


def _expressions(truth: str) -> list[Any]:
    text = _plain(truth, True)
    found = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
    if not found:
        raise ScoringError(f"the ground truth {truth!r:.100} holds no expression")
    return list(found)


def _equal(truth: list[Any], answer: str) -> float:
    return float(verify(truth, parse(_final(answer), parsing_timeout=None), timeout_seconds=None))


def _plain(text: str, closed: bool) -> str:
    """The text, with its numbers in the form that math-verify reads. `closed`: the text is only the answer, so a space
    between digits separates thousands."""
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return (_SPACED if closed else _GROUPED).sub(lambda match: _NO_DIGITS.sub("", match[0]), text)


def _final(answer: str) -> str:
    """The last boxes of the answer. Without a box it is the content of the answer tag, and without a tag the whole
    answer."""
    inside = tagged(answer)
    found = boxes(inside)
    if not found:
        return _plain(inside, inside is not answer)
    last = [found[-1]]
    for before, after in reversed(list(pairwise(found))):
        if not _JOINED.fullmatch(inside, before.end, after.start):
            break
        last.insert(0, before)
    if len(last) > 1:
        return ", ".join(f"\\boxed{{{_plain(each.content, True)}}}" for each in last)
    (box,) = last
    return f"\\boxed{{{_plain(box.content, True)}}}{inside[box.end :]}"
