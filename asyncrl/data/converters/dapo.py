"""Makes tasks from DAPO-Math-17k (Yu et al., 2025), which is Parquet in verl's layout.

The published file repeats each problem about a hundred times; only the first copy is kept. All answers are integers, so
both the rule `exact_number` and the rule `math` can score them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.data.converters.rows import published_rows, text_of
from asyncrl.errors import DataError
from asyncrl.types import Task

DATA_SOURCE = "math_dapo"


def tasks(source: str) -> Iterator[Task | None]:
    """The tasks, with None for each repeated problem. Raises DataError.

    Rows have `prompt`, `reward_model.ground_truth` and optionally `extra_info.index`. The prompt, which asks for a last
    line `Answer: ...`, is not changed.
    """
    seen: set[str] = set()
    for place, row in published_rows(source):
        prompt, truth = _messages(row.get("prompt")), text_of(_entry(row.get("reward_model"), "ground_truth"))
        if not prompt or not truth:
            raise DataError(f"{place} has no messages in prompt, or no reward_model.ground_truth")
        if (text := str(prompt[-1]["content"])) in seen:
            yield None
            continue
        seen.add(text)
        index = _entry(row.get("extra_info"), "index")
        yield Task(
            id=place,
            messages=prompt,
            ground_truth=truth,
            data_source=DATA_SOURCE,
            extra_info={} if index is None else {"index": index},
        )


def _entry(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else None


def _messages(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt; empty if a message lacks its role or content."""
    found = prompt if isinstance(prompt, list) else []
    whole = (isinstance(_entry(each, "role"), str) and _entry(each, "content") is not None for each in found)
    return found if all(whole) else []
