"""The counterpart of every key of TRL's GRPOConfig, its trainer and its command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.compat.report import Table
from asyncrl.compat.rows import Row
from asyncrl.compat.trl import algorithm_rows, engine_rows, model_rows, reward_rows, training_rows

ROWS: tuple[Row, ...] = (
    *model_rows.ROWS,
    *reward_rows.ROWS,
    *training_rows.ROWS,
    *algorithm_rows.ROWS,
    *engine_rows.ROWS,
    *training_rows.OTHERS,
)
BY_KEY: Mapping[str, Row] = {key: row for row in ROWS for key in row.there}
DEFAULTS: Mapping[str, Any] = {key: value for row in ROWS for key, value in row.defaults.items()}


def row_of(key: str) -> Row | None:
    """The row of a key; None for an unknown key."""
    return BY_KEY.get(key) or BY_KEY.get(f"{key.partition('.')[0]}.*")


TABLE = Table(ROWS, row_of, "TRL", "GRPOConfig of TRL 1.16")
