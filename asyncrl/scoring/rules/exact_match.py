"""The answer is the ground truth, word for word."""

from __future__ import annotations

import unicodedata

from asyncrl.scoring.rules.text import tagged
from asyncrl.types import Task, Trajectory


def exact_match(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 if the answer, or the content of its last `<answer>` tag, equals the ground truth, else 0. White space at both
    ends, the kind of line ends and the Unicode composition of characters are ignored."""
    return float(_text(task.truth_text) in (_text(answer), _text(tagged(answer))))


def _text(text: str) -> str:
    return unicodedata.normalize("NFC", "\n".join(text.splitlines())).strip()
