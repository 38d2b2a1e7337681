"""Word overlap with the ground truth, as question answering measures it (SQuAD)."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.text import tagged
from asyncrl.types import Task, Trajectory

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def f1(task: Task, answer: str, trajectory: Trajectory) -> Mapping[str, float]:
    """`score`, the F1 of the words, and `exact`, 1 where they are the same, after removing case, punctuation and
    articles. Of an answer with `<answer>` tags the last one's words count. A ground truth that is a JSON list of texts
    counts as the best of them.

    Raises ScoringError: the ground truth has no words.
    """
    truths = [words for truth in _truths(task.ground_truth) if (words := _words(truth))]
    if not truths:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} of task {task.id} has no words")
    words = _words(tagged(answer))
    return {"score": max(_overlap(words, truth) for truth in truths), "exact": float(words in truths)}


def _truths(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except ValueError:
        return [text]
    return [str(each) for each in parsed] if isinstance(parsed, list) else [text]


def _words(text: str) -> list[str]:
    letters = (character for character in text.lower() if not unicodedata.category(character).startswith("P"))
    return _ARTICLES.sub(" ", "".join(letters)).split()


def _overlap(words: list[str], truth: list[str]) -> float:
    shared = (Counter(words) & Counter(truth)).total()
    return 2 * shared / (len(words) + len(truth))
