"""Checks that some values do not change during the life of a store, since its rows, groups and ids depend on them. The
most important ones are the tasks: stored groups refer to tasks by row number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import msgspec

from asyncrl.errors import StoreError
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Task

CHECKED_TASKS = 512
"""The number of tasks that are compared when the replay restarts. These are all tasks of a small set, and enough tasks
of a large set to notice a changed order."""

CHECKSUM = "_checksum"
FILES = {"tasks": "data.train", "held_out": "data.eval"}


def pinned_tasks(train: Sequence[Task], held_out: Sequence[Task]) -> dict[str, int]:
    """The number of tasks and a checksum of them, for training and held-out tasks."""
    counts = {"tasks": len(train), "held_out": len(held_out)}
    return {**counts, f"tasks{CHECKSUM}": _checksum(train), f"held_out{CHECKSUM}": _checksum(held_out)}


def require_pinned(tx: Transaction, now: Mapping[str, int]) -> None:
    """Raises StoreError: the store was created with different values than `now`."""
    before = tx.get("meta", "pinned", dict[str, int]) or {}
    # Before the first group, no record refers to a row, so the data file may still be changed.
    named = tx.counter("feed_draws") or tx.count("groups")
    kept = {name: value for name, value in before.items() if named or not name.endswith(CHECKSUM)}
    changed = {name: (value, now[name]) for name, value in kept.items() if value != now.get(name, value)}
    if not changed:
        return
    lines = [f"{name} was {was} and is {value}" for name, (was, value) in changed.items() if not _is_of_tasks(name)]
    for name, file in FILES.items():
        if name in changed:
            lines.append(f"{file} had {changed[name][0]} tasks and has {changed[name][1]}")
        elif name + CHECKSUM in changed:
            lines.append(f"{file} has the same number of tasks, but different ones or in another order")
    hints = {
        "restore the data files, since stored episodes refer to tasks by row number": _is_of_tasks,
        "set the other keys back": lambda name: not _is_of_tasks(name),
    }
    hint = ", and ".join(hint for hint, concerns in hints.items() if any(map(concerns, changed)))
    raise StoreError(
        f"this store belongs to a run with another configuration or other data: {'; '.join(lines)}; {hint}, or choose "
        "another run.name"
    )


def _is_of_tasks(name: str) -> bool:
    return name.removesuffix(CHECKSUM) in FILES


def _checksum(tasks: Sequence[Task]) -> int:
    """A checksum of evenly spaced tasks. It also detects a changed order, for example after data files were renamed."""
    rows = sorted({row * len(tasks) // CHECKED_TASKS for row in range(CHECKED_TASKS)}) if tasks else []
    checksum = 0
    for row in rows:
        task = tasks[row]
        checked = [task.id, task.messages, task.ground_truth, task.demonstration]
        checksum = crc32(msgspec.json.encode(checked), checksum)
    return checksum
