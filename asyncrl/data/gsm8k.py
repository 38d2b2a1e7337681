"""`asyncrl data gsm8k`: GSM8K's published JSON lines to tasks, grade-school problems with a calculator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.data.writing import write_tasks
from asyncrl.errors import AsyncrlError, DataError
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


def main() -> None:
    """The entry of the command line."""
    parser = argparse.ArgumentParser(prog="asyncrl data", description="Make task files from published data sets.")
    sets = parser.add_subparsers(dest="set", metavar="SET", required=True)
    gsm8k = sets.add_parser("gsm8k", help="GSM8K's published JSON lines to Parquet")
    gsm8k.add_argument("--source", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    gsm8k.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    gsm8k.add_argument("--split", default="train", help="which of the files: train (default) or test")
    arguments = parser.parse_args()
    try:
        rows = convert(arguments.source, arguments.out, arguments.split)
    except AsyncrlError as error:
        sys.stderr.write(f"asyncrl data: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"wrote {rows} tasks to {arguments.out}\n")
