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
    """`score` is the F1 of the words, without case, punctuation and articles; `exact` is 1 if the words are the same.
    Of an answer with `<answer>` tags, only the last tag's words count. If the ground truth is a JSON list of texts, the
    text with the best score counts.

    Raises ScoringError: the ground truth has no words.
    """
    truths = [words for truth in _truths(task.truth_text) if (words := _words(truth))]
    if not truths:
        raise ScoringError(f"the ground truth {task.truth_text!r:.100} of task {task.id} has no words")
    words = _words(tagged(answer))
    scores = [2 * (Counter(words) & Counter(truth)).total() / (len(words) + len(truth)) for truth in truths]
    return {"score": max(scores), "exact": float(words in truths)}


def _truths(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except ValueError:
        return [text]
    return [str(each) for each in parsed] if isinstance(parsed, list) else [text]


def _words(text: str) -> list[str]:
    letters = (character for character in text.lower() if not unicodedata.category(character).startswith("P"))
    return _ARTICLES.sub(" ", "".join(letters)).split()
