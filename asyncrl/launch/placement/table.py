"""A placement as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.launch.placement.placement import PlacedRole, Placement

NO_TURNS = (
    "cluster.colocated: the learner has no GPU here; it and the servers still take turns, which costs time and frees "
    "no memory"
)
COLUMNS = ("process", "pool", "host", "GPUs", "CPUs", "threads", "port", "")


def placement_table(placement: Placement, names: Sequence[str] = ()) -> str:
    """A line for each process, and one for each host that has GPUs nobody uses. `names` are those of the hosts."""
    rows = [COLUMNS, *(_row(role, placement, names) for role in placement.roles)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for node, host in enumerate(placement.hosts):
        used = {gpu for role in placement.roles if role.node == node for gpu in role.gpus or ()}
        if unused := sorted(set(range(host.gpus)) - used):
            lines.append(f"unused on {_host(node, names)}: GPU {_numbers(unused)}")
    if placement.in_turns and not any(role.gpus for role in placement.roles if role.module == "learner"):
        lines.append(NO_TURNS)
    return "\n".join(lines) + "\n"


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
    """GPU numbers, a run of them as FIRST-LAST."""
    if len(gpus) > 2 and list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))
