"""The answer is the ground truth, word for word."""

from __future__ import annotations

import unicodedata

from asyncrl.scoring.rules.text import tagged
from asyncrl.types import Task, Trajectory


def exact_match(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer, or what its last `<answer>` tag holds, equals the ground truth, apart from white space around
    them, kinds of line ends, and ways to compose one character, else 0."""
    return float(_text(task.ground_truth) in (_text(answer), _text(tagged(answer))))


def _text(text: str) -> str:
    return unicodedata.normalize("NFC", "\n".join(text.splitlines())).strip()
