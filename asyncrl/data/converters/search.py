"""Makes tasks from questions with short answers, such as HotpotQA or TriviaQA, to be answered with a search tool.

The rule `f1` scores them; its extra score `exact` is the exact match.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.data.converters.rows import published_rows, text_of
from asyncrl.errors import DataError
from asyncrl.types import Task

SYSTEM_PROMPT = (
    "Answer the question. Search for what you do not know, as often as you need. Give the answer alone, in a few "
    "words, between <answer> and </answer>."
)


def tasks(source: str, name: str = "searchqa") -> Iterator[Task]:
    """The tasks. `name` is the data source of rows without `data_source`. Raises DataError.

    Rows have `question`, and `golden_answers` (a list, as in FlashRAG) or `answer` (a text, a list, or TriviaQA's
    mapping with `value` and `aliases`).
    """
    for place, row in published_rows(source):
        answers = _answers(row.get("golden_answers")) or _answers(row.get("answer"))
        question = text_of(row.get("question"))
        if not question or not answers:
            raise DataError(f"{place} has no question, or neither golden_answers nor an answer")
        yield Task(
            id=place,
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
            ground_truth=json.dumps(answers, ensure_ascii=False),
            data_source=str(row.get("data_source") or name),
        )


def _answers(given: Any) -> list[str]:
    """The texts and numbers among the answers, each once."""
    if isinstance(given, Mapping):
        given = [given.get("value"), *(given.get("aliases") or ())]
    found = map(text_of, given if isinstance(given, list) else [given])
    return list(dict.fromkeys(text for text in found if text))
