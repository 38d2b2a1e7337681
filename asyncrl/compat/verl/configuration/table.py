"""The counterpart of every key of verl's PPO configuration. `translation.py` and `page.py` read this table."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.compat.rows import Row
from asyncrl.compat.verl.configuration import (
    actor_rows,
    advantage_rows,
    async_rows,
    correction_rows,
    data_rows,
    loss_rows,
    model_rows,
    placement_rows,
    reward_rows,
    rollout_rows,
    trainer_rows,
)

TABLE: tuple[Row, ...] = (
    *async_rows.ROWS,
    *data_rows.ROWS,
    *model_rows.ROWS,
    *actor_rows.ROWS,
    *rollout_rows.ROWS,
    *advantage_rows.ROWS,
    *loss_rows.ROWS,
    *correction_rows.ROWS,
    *reward_rows.ROWS,
    *trainer_rows.ROWS,
    *placement_rows.ROWS,
)

BY_KEY: Mapping[str, Row] = {key: row for row in TABLE for key in row.there}


def row_of(key: str) -> Row | None:
    """The key's own row, else the row of the nearest section that has one; None for an unknown key."""
    section = key
    found = BY_KEY.get(key) or BY_KEY.get(f"{key}.*")
    while found is None and "." in section:
        section = section.rpartition(".")[0]
        found = BY_KEY.get(f"{section}.*")
    return found
