"""DAPO-Math-17k (Yu et al., 2025), Parquet in verl's layout. The published file has each problem about a hundred times,
of which the first is kept. The rules `exact_number` (all answers are integers) and `math` score it."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.data.converters.rows import published_rows
from asyncrl.errors import DataError
from asyncrl.types import Task

DATA_SOURCE = "math_dapo"


def tasks(source: str) -> Iterator[Task | None]:
    """Rows: `prompt`, `reward_model.ground_truth`, optional `extra_info.index`. The prompt stays, which asks for a last
    line `Answer: ...`. Problems that were there before are None. Raises DataError."""
    seen: set[str] = set()
    for place, row in published_rows(source):
        prompt, truth = row.get("prompt"), (row.get("reward_model") or {}).get("ground_truth")
        if not isinstance(prompt, list) or not prompt or not str(truth or "").strip():
            raise DataError(f"{place} has no messages in prompt, or no reward_model.ground_truth")
        if (text := str(prompt[-1]["content"])) in seen:
            yield None
            continue
        seen.add(text)
        index = (row.get("extra_info") or {}).get("index")
        yield Task(
            id=place,
            messages=prompt,
            ground_truth=str(truth).strip(),
            data_source=DATA_SOURCE,
            extra_info={} if index is None else {"index": index},
        )
