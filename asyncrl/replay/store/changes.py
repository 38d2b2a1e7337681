"""Keeps the run's configuration in the store: the newest values, and every change with the first step that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.changes import ConfigChange, changed_keys, recorded, require_values
from asyncrl.replay.store.transaction import Transaction

VALUES, CHANGES = "config", "config_changes"
"""The keys in the table `meta` under which the newest values and the changes are stored."""


def changes(tx: Transaction) -> list[ConfigChange]:
    """Every recorded change, in order."""
    return tx.get("meta", CHANGES, list[ConfigChange]) or []


def set_changes(tx: Transaction, recorded: list[ConfigChange]) -> None:
    """Replace the recorded changes."""
    tx.put("meta", CHANGES, recorded)


def configure(tx: Transaction, values: Mapping[str, Any], time: int, planned: int) -> list[ConfigChange]:
    """Record the values that the learner uses from now on. Returns all changes so far. The values of a new run do not
    count as changes, and neither do secrets, which are not recorded. `planned` is the number of steps that every shard
    has planned.

    Raises ConfigError: `values` lacks a key, has an unknown key or a wrong value, or changes a key that a resumed run
    must keep.
    """
    require_values(values)
    values, before, found = recorded(values), tx.get("meta", VALUES, dict[str, Any]), changes(tx)
    if before is not None:
        # A key that is new in this version of asyncrl does not count as changed.
        before = {**values, **recorded(before)}
        for key in changed_keys(before, values):
            found.append(ConfigChange(planned, key, before[key], values[key], time))
    if before != values:
        set_changes(tx, found)
        tx.put("meta", VALUES, values)
    return found
