"""Questions with short answers, as of HotpotQA, Natural Questions or TriviaQA, to be answered with a search tool. The
rule `f1` scores them; its number `exact` is the exact match."""

from __future__ import annotations

import json
from collections.abc import Iterator

from asyncrl.data.converters.rows import published_rows
from asyncrl.errors import DataError
from asyncrl.types import Task

SYSTEM_PROMPT = (
    "Answer the question. Search for what you do not know, as often as you need. Give the answer alone, in a few "
    "words, between <answer> and </answer>."
)


def tasks(source: str, name: str = "searchqa") -> Iterator[Task]:
    """Rows: `question`, and `golden_answers` (a list, as FlashRAG publishes them) or `answer` (a text or a list).
    `name` is the data source of rows without `data_source`. Raises DataError."""
    for place, row in published_rows(source):
        answers = row.get("golden_answers") or row.get("answer") or []
        answers = [str(each) for each in (answers if isinstance(answers, list) else [answers])]
        if not row.get("question") or not any(map(str.strip, answers)):
            raise DataError(f"{place} has no question, or neither golden_answers nor an answer")
        yield Task(
            id=place,
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": str(row["question"])},
            ],
            ground_truth=json.dumps(answers, ensure_ascii=False),
            data_source=str(row.get("data_source") or name),
        )
