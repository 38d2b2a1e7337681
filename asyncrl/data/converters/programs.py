"""Makes tasks from programming problems with tests, such as APPS and TACO. The rule `code` scores them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from asyncrl.data.converters.rows import Row, json_of, published_rows, text_of
from asyncrl.errors import DataError
from asyncrl.types import Task

READS = "Write a Python program that reads from standard input and prints to standard output."
CALLED = "Write Python that defines what the tests call: {name}."


def tasks(source: str, name: str = "apps") -> Iterator[Task | None]:
    """The tasks, with None for each row without tests. Raises DataError.

    Rows have `question`, `input_output` (JSON with `inputs`, `outputs`, and `fn_name` if a function is tested), and
    optionally `starter_code` and `difficulty`.
    """
    for place, row in published_rows(source):
        try:
            tests = json_of(row.get("input_output") or "{}")
            pairs = _pairs(tests)
            function = tests.get("fn_name")
            if function:
                _check_calls(function, pairs)
            question = text_of(row.get("question"))
            if not question:
                raise ValueError("the question is not a text")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{place} has no question, or no input_output with inputs and outputs: {error}") from error
        if not pairs:
            yield None
            continue
        request = CALLED.format(name=function) if function else READS
        starter = f"\n\nBegin with:\n{row['starter_code']}" if row.get("starter_code") else ""
        yield Task(
            id=place,
            messages=[{"role": "user", "content": f"{question}\n\n{request}{starter}"}],
            ground_truth=_asserts(function, row, pairs) if function else _texts(pairs),
            data_source=name,
            extra_info={"difficulty": str(row["difficulty"])} if row.get("difficulty") else {},
        )


def _pairs(tests: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each input with its output. Raises ValueError or TypeError: inputs and outputs are not lists of equal length."""
    sides = [tests.get(name) or [] for name in ("inputs", "outputs")]
    if not all(isinstance(side, list) for side in sides):
        raise TypeError("inputs and outputs must be lists")
    return list(zip(*sides, strict=True))


def _check_calls(function: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Raises ValueError: the tests cannot call the function."""
    if not all(name.isidentifier() for name in str(function).split(".")):
        raise ValueError(f"fn_name is {function!r:.100}, which is not a name")
    if not all(isinstance(arguments, list) for arguments, _ in pairs):
        raise ValueError("each input of a function must be a list of arguments")


def _texts(pairs: list[tuple[Any, Any]]) -> str:
    """The inputs and outputs of a program, as JSON. A list of lines becomes one text."""
    texts = [["\n".join(map(str, side)) if isinstance(side, list) else str(side) for side in pair] for pair in pairs]
    return json.dumps({"inputs": [given for given, _ in texts], "outputs": [wanted for _, wanted in texts]})


def _asserts(function: str, row: Row, pairs: list[tuple[Any, Any]]) -> str:
    """An assertion for each test. As in the tests of APPS, a tuple counts as a list. If the expected output is a list,
    its first item is right as well, because APPS puts most results into a list of one item.
    """
    called = f"Solution().{function}" if "class Solution" in str(row.get("starter_code")) else function
    lines = ["def plain(found):\n    return list(found) if isinstance(found, tuple) else found"]
    for arguments, wanted in pairs:
        allowed = [wanted, *wanted[:1]] if isinstance(wanted, list) else [wanted]
        lines.append(f"assert plain({called}({', '.join(map(repr, arguments))})) in {allowed!r}")
    return "\n".join(lines)
