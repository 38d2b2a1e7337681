"""Shows a placement as a table for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import TextIO

from asyncrl.launch.placement.placement import PlacedRole, Placement

NO_TURNS = (
    "cluster.colocated: the learner has no GPU here; it and the servers still take turns, which costs time and frees "
    "no memory"
)
COLUMNS = ("process", "pool", "host", "GPUs", "CPUs", "threads", "port", "")
NAMES = (0, 1, 2)
"""The columns whose cells a narrow table wraps."""
SHORTEST_NAME = 8
GAP, INDENT = "  ", "    "


def terminal_width(stream: TextIO) -> int | None:
    """Return the width of the terminal that `stream` writes to. `None`: it is not a terminal, or its width is
    unknown."""
    return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None


def placement_table(placement: Placement, names: Sequence[str] = (), width: int | None = None) -> str:
    """Return a table with a line for each process, and below it a line for each host that has unused GPUs. `names` has
    the names of the hosts. Lines longer than `width` are wrapped."""
    rows = [COLUMNS, *(_row(role, placement, names) for role in placement.roles)]
    lines = list(_table(rows, width or sys.maxsize))
    texts = []
    for node, host in enumerate(placement.hosts):
        used = {gpu for role in placement.roles if role.node == node for gpu in role.gpus or ()}
        if unused := sorted(set(range(host.gpus)) - used):
            texts.append(f"unused on {_host(node, names)}: GPU {_numbers(unused)}")
    if placement.in_turns and not any(role.gpus for role in placement.roles if role.module == "learner"):
        texts.append(NO_TURNS)
    for text in texts:
        lines += [text] if width is None else wrap(text, width)
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table. If it would be wider than `width`, the last cell of each row is on a line below the
    row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    if _total(widths) <= width:
        yield from (_line(row, widths) for row in rows)
        return
    widths.pop()
    while _total(widths) > width and widths[longest := max(NAMES, key=widths.__getitem__)] > SHORTEST_NAME:
        widths[longest] -= 1
    for *cells, notes in rows:
        parts = (wrap(cell, size, break_on_hyphens=False) for cell, size in zip(cells, widths, strict=True))
        yield from (_line(line, widths) for line in zip_longest(*parts, fillvalue=""))
        yield from wrap(notes, width, initial_indent=INDENT, subsequent_indent=INDENT)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)).rstrip()


def _row(role: PlacedRole, placement: Placement, names: Sequence[str]) -> tuple[str, ...]:
    gpus = "all" if role.gpus is None else _numbers(role.gpus) or "-"
    port = {None: "-", 0: "any"}.get(role.port, str(role.port))
    ranks = f" in {len(role.gpus)} ranks" if role.module == "learner" and role.gpus and len(role.gpus) > 1 else ""
    others = [
        each.name
        for each in placement.roles
        if each is not role and each.node == role.node and set(each.gpus or ()) & set(role.gpus or ())
    ]
    shares = f"{'takes turns' if placement.in_turns else 'shares'} with {', '.join(others)}" if others else ""
    notes = ", ".join(each for each in (" ".join(role.arguments), shares) if each)
    return (
        *(role.name + ranks, role.pool, _host(role.node, names), gpus, str(role.cpus), str(role.threads)),
        *(port, notes),
    )


def _host(node: int, names: Sequence[str]) -> str:
    return names[node] if names else str(node)


def _numbers(gpus: Sequence[int]) -> str:
    """Write GPU numbers, such as "0,2", or "0-3" for a range."""
    if len(gpus) > 2 and list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))
