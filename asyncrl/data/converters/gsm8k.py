"""Makes tasks and demonstrations from GSM8K's published JSON lines, for a policy with a calculator.

The rule `gsm8k` scores the tasks. The solutions mark their calculations, such as `<<48/2=24>>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.converters.calculator_calls import Calculation, LeftOut, demonstration
from asyncrl.errors import DataError
from asyncrl.ids import task_id
from asyncrl.types import Task

DATA_SOURCE = "openai/gsm8k"
SPLITS = ("train", "test")
SYSTEM_PROMPT = (
    "Solve the problem step by step. Work out every calculation with the calculator, one operation a call. "
    'End with the answer alone on the last line, as "#### 42".'
)
_CALCULATION = re.compile(r"<<([^>=]*)=?([^>]*)>>")


def tasks(source: Path, split: str) -> Iterator[Task]:
    """The tasks in `source/split.jsonl`, one per line. Raises DataError."""
    return (task for task, _ in _solved(source, split))


def demonstrations(source: Path, split: str) -> Iterator[list[Mapping[str, Any]] | LeftOut]:
    """The messages of a demonstration for each task of `tasks`, or the reason why it has none. Raises DataError."""
    for task, solution in _solved(source, split):
        # The pieces are text, expression, result, text, expression, result, ..., text.
        *pieces, last = _CALCULATION.split(solution)
        calculations = map(Calculation._make, zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True))
        yield demonstration(task.messages, calculations, f"{last.rstrip()}\n#### {task.ground_truth}")


def _solved(source: Path, split: str) -> Iterator[tuple[Task, str]]:
    """The tasks with their solutions, without the answer at the end of each solution. Raises DataError."""
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
            question, (solution, truth) = row["question"].strip(), row["answer"].rsplit("####", 1)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{file}, line {index + 1} has no question, or no answer that ends in '#### N'") from error
        task = Task(
            id=task_id(DATA_SOURCE, split, index),
            messages=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
            ground_truth=truth.strip().replace(",", ""),
            data_source=DATA_SOURCE,
            extra_info={"split": split, "index": index},
        )
        yield task, solution
