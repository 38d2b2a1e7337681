"""The run's configuration in the store: the newest values, and every change with its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.changes import ConfigChange, changed_keys, recorded, require_values
from asyncrl.replay.transaction import Transaction

VALUES, CHANGES = "config", "config_changes"
"""The keys of the table `meta`."""


def changes(tx: Transaction) -> list[ConfigChange]:
    """Every recorded change, in order."""
    return tx.get("meta", CHANGES, list[ConfigChange]) or []


def set_changes(tx: Transaction, recorded: list[ConfigChange]) -> None:
    """Record these changes instead."""
    tx.put("meta", CHANGES, recorded)


def configure(tx: Transaction, values: Mapping[str, Any], time: int) -> list[ConfigChange]:
    """Record the values that the learner uses from now on; returns every change so far. The values of a new run are no
    change. Secrets are not recorded, and so are no change either.

    Raises ConfigError: these are not the values of all keys, or a run that resumes keeps some of its values.
    """
    require_values(values)
    values, before, found = recorded(values), tx.get("meta", VALUES, dict[str, Any]), changes(tx)
    if before is not None:
        # A key that came with a newer version of asyncrl than the one that began the run is no change.
        before = {**values, **recorded(before)}
        step = tx.count("plans")
        for key in changed_keys(before, values):
            found.append(ConfigChange(step, key, before[key], values[key], time))
    if before != values:
        set_changes(tx, found)
        tx.put("meta", VALUES, values)
    return found
