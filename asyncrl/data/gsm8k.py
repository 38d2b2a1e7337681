"""GSM8K's published JSON lines to tasks: grade-school problems, with a calculator to work them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from asyncrl.data.writing import write_tasks
from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task

DATA_SOURCE = "openai/gsm8k"
SYSTEM_PROMPT = (
    "Solve the problem step by step. Work out every calculation with the calculator, one operation a call. "
    'End with the answer alone on the last line, as "#### 42".'
)


def convert(source: Path, out: Path, split: str = "train") -> int:
    """Convert `source/split.jsonl` to the Parquet file `out`; returns the number of tasks. Raises DataError."""
    file = source / f"{split}.jsonl"
    if not file.is_file():
        raise DataError(f"there is no {file}; --source is the folder that holds GSM8K's {split}.jsonl")
    return write_tasks(out, _tasks(file, split))


def _tasks(file: Path, split: str) -> Iterator[Task]:
    for index, line in enumerate(file.read_text("utf-8").rstrip("\n").split("\n")):
        try:
            row = json.loads(line)
            question, (_, truth) = row["question"], row["answer"].rsplit("####", 1)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}, line {index + 1} has no question and no answer ending in '#### N'") from error
        yield Task(
            id=task_id(DATA_SOURCE, split, index),
            messages=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
            ground_truth=truth.strip().replace(",", ""),
            data_source=DATA_SOURCE,
            extra_info={"split": split, "index": index},
        )
