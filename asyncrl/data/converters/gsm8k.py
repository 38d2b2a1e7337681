"""Makes tasks from GSM8K's published JSON lines, for a policy with a calculator. The rule `gsm8k` scores them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task

DATA_SOURCE = "openai/gsm8k"
SPLITS = ("train", "test")
SYSTEM_PROMPT = (
    "Solve the problem step by step. Work out every calculation with the calculator, one operation a call. "
    'End with the answer alone on the last line, as "#### 42".'
)


def tasks(source: Path, split: str) -> Iterator[Task]:
    """The tasks in `source/split.jsonl`, one per line. Raises DataError."""
    file = source / f"{split}.jsonl"
    if source.is_file():
        named = f" --split {source.stem}" if source.stem != split else ""
        raise DataError(f"{source} is a file; name its folder: --source {source.parent}{named}")
    if not file.is_file():
        mend = f"the splits of GSM8K are {' and '.join(SPLITS)}"
        if split in SPLITS:
            mend = f"--source must be the folder with GSM8K's {split}.jsonl"
        raise DataError(f"{file} does not exist; {mend}")
    try:
        content = file.read_text("utf-8-sig")  # Some programs on Windows write a byte order mark.
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text: {error}") from error
    for index, line in enumerate(content.rstrip("\n").split("\n")):
        try:
            row = json.loads(line)
            question, (_, truth) = row["question"].strip(), row["answer"].rsplit("####", 1)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{file}, line {index + 1} has no question, or no answer that ends in '#### N'") from error
        yield Task(
            id=task_id(DATA_SOURCE, split, index),
            messages=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
            ground_truth=truth.strip().replace(",", ""),
            data_source=DATA_SOURCE,
            extra_info={"split": split, "index": index},
        )
