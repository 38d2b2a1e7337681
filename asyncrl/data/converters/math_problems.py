"""Makes tasks from MATH (Hendrycks et al., 2021): files of one problem each, or rows with the same fields.

The rule `math` scores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.data.converters.rows import published_rows, text_of
from asyncrl.errors import DataError
from asyncrl.types import Task

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
"""The data source of these tasks. verl uses the same name."""
REQUEST = "Reason step by step, and put the final answer into \\boxed{}."

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=\S))")
_BARE = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\}|\d)*|\S")
"""The answer after a \\boxed without braces: a command with its arguments, or one character."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def tasks(source: str) -> Iterator[Task]:
    """The tasks. Raises DataError.

    Rows have `problem`, and `answer` or a `solution` whose last \\boxed{} has the answer. Optional: `level`, `type`,
    `subject`.
    """
    for place, row in published_rows(source):
        problem, answer = text_of(row.get("problem")), row.get("answer")
        answer = last_box(str(row.get("solution"))) if answer in (None, "") else text_of(answer)
        if not problem or not answer:
            raise DataError(f"{place} has no problem, or no solution with a \\boxed answer")
        yield Task(
            id=place,
            messages=[{"role": "user", "content": f"{problem}\n\n{REQUEST}"}],
            ground_truth=answer,
            data_source=DATA_SOURCE,
            extra_info={name: str(row[name]) for name in ("level", "type", "subject") if row.get(name) is not None},
        )


def last_box(solution: str) -> str:
    """The content of the last closed \\boxed{...}, or the character or command after \\boxed; empty without a box."""
    for box in reversed(list(_BOX.finditer(solution))):
        if not box.group().endswith("{"):
            bare = _BARE.match(solution, box.end())
            return bare.group() if bare else ""
        depth = 1
        for brace in _BRACE.finditer(solution, box.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if not depth:
                return solution[box.end() : brace.start()].strip()
    return ""
