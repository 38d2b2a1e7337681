"""Tasks to Parquet in verl's layout."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.types import Task


def write_tasks(path: Path, tasks: Iterable[Task]) -> int:
    """Write tasks aside, then in place; returns how many. `extra_info` and `tools_kwargs` go where verl has them."""
    rows = [
        {
            "prompt": [dict(message) for message in task.messages],
            "data_source": task.data_source,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
            "extra_info": {**task.extra_info, **({"tools_kwargs": task.tools_kwargs} if task.tools_kwargs else {})},
        }
        for task in tasks
    ]
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), aside, compression="zstd")
    aside.rename(path)
    return len(rows)
