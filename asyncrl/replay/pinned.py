"""Values that may not change while a store lasts, since its rows, groups and ids rest on them. Above all these are the
tasks, which stored groups know by their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import msgspec

from asyncrl.errors import StoreError
from asyncrl.replay.transaction import Transaction
from asyncrl.types import Task

CHECKED_TASKS = 512
"""The tasks that a restart reads: all of a small set, and enough of a large one to notice another order."""

CHECKSUM = "_checksum"
FILES = {"tasks": "data.train", "held_out": "data.eval"}


def pinned_tasks(train: Sequence[Task], held_out: Sequence[Task]) -> dict[str, int]:
    """The values by which a store knows its tasks: their number, and a checksum."""
    counts = {"tasks": len(train), "held_out": len(held_out)}
    return {**counts, f"tasks{CHECKSUM}": _checksum(train), f"held_out{CHECKSUM}": _checksum(held_out)}


def require_pinned(tx: Transaction, now: Mapping[str, int]) -> None:
    """Raises StoreError: the store was begun with another one of the values `now`."""
    before = tx.get("meta", "pinned", dict[str, int]) or {}
    # Without a group no row has been named, so that a data file may still be mended.
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
            lines.append(f"{file} has as many tasks, but others, or in another order")
    hints = {
        "have the data files as they were, since stored episodes know tasks by their place": _is_of_tasks,
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
    """One of tasks at even distances. It also differs where files are renamed, so that their rows have other places."""
    rows = sorted({row * len(tasks) // CHECKED_TASKS for row in range(CHECKED_TASKS)}) if tasks else []
    checksum = 0
    for row in rows:
        task = tasks[row]
        checked = [task.id, task.messages, task.ground_truth, task.demonstration]
        checksum = crc32(msgspec.json.encode(checked), checksum)
    return checksum
