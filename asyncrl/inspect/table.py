"""Tables for a terminal: the status of a replay, and dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asyncrl.replay.records import DeadLetter

BAR_WIDTH = 24
WORKERS_SHOWN = 16
MIB = 1 << 20


def printable(text: str) -> str:
    """Text without effect on a terminal: a policy, a tool or a worker may have written escape sequences."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


def describe_dead_letters(letters: Iterable[tuple[str, DeadLetter]]) -> list[dict[str, Any]]:
    """Dead letters as plain values. `attempts` is the number of failures of that member so far."""
    return [{"id": name, **structs.asdict(letter), "attempts": letter.attempt + 1} for name, letter in letters]


def dead_letter_table(letters: Sequence[tuple[str, DeadLetter]]) -> Table:
    """Dead letters for a terminal."""
    table = _table(f"{len(letters)} dead letters", "id", "failed in", "attempts", "reason", numbers=False)
    table.columns[0].no_wrap = True
    for name, letter in letters:
        failed_in = "scoring" if letter.scoring else "episode"
        table.add_row(name, failed_in, str(letter.attempt + 1), escape(printable(letter.reason)))
    return table


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """The values of `status.describe`, readable."""
    return Group(
        _title(status),
        Columns([_flow(status), _rows("by state", status["states"]), _queues(status)], padding=(1, 4)),
        _lags(status["lags"]),
        "",
        _leases(status["leases"]),
        "",
        Text(_oldest_ticket(status["oldest_ticket"])),
        Text(_disk(status["disk"])),
        *(Text(_reader(each), "yellow") for each in status["readers"]),
        *(Text(f"failing         {each}", "yellow") for each in status["failing"]),
    )


def _title(status: Mapping[str, Any]) -> Text:
    title = Text.assemble(
        (status["store"], "bold"), f"\nversion {status['version']}   {status['steps']} steps planned   "
    )
    if status["problem"] is None:
        return title.append("running", "green")
    title.append("running in part" if status["running"] else "not running", "yellow")
    return title.append(f"   {status['problem']}", "dim")


def _table(title: str, *columns: str, numbers: bool = True) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and numbers else "left", header_style="dim")
    return table


def _flow(status: Mapping[str, Any]) -> Table:
    table = _table("trajectories", "", "total", "a second")
    rates = status["rates"]
    for name, total in status["totals"].items():
        table.add_row(name.replace("_", " "), f"{total}", "-" if rates is None else f"{rates[name]:.1f}")
    return table


def _queues(status: Mapping[str, Any]) -> Table:
    rows = dict(status["depths"])
    if status["running"]:
        rows["admitted"] = f"{status['admission']['committed']}/{status['admission']['capacity']}"
        rows["rejected"] = status["failed_handshakes"]
    return _rows("queues", rows)


def _rows(title: str, rows: Mapping[str, object]) -> Table:
    table = _table(title, "", "")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _lags(lags: Mapping[str, Mapping[int, int]]) -> Table:
    table = _table("lag", "versions", "groups that are ready", "trajectories of the newest plans", numbers=False)
    ready, planned = lags["ready_groups"], lags["planned_trajectories"]
    for lag in sorted(ready.keys() | planned.keys()):
        table.add_row(str(lag), _bar(ready, lag, "cyan"), _bar(planned, lag, "magenta"))
    return table


def _bar(counts: Mapping[int, int], lag: int, colour: str) -> Text:
    count = counts.get(lag, 0)
    width = round(BAR_WIDTH * count / max(counts.values())) if count else 0
    return Text.assemble(("█" * width, colour), f" {count}" if count else "")


def _leases(leases: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("leases", "", "holds", "heard")
    for lease in leases[:WORKERS_SHOWN]:
        name = f"[dim]{lease['kind'][:-1]}[/] {escape(printable(lease['worker']))}"
        table.add_row(name, str(lease["holds"]), _ago(lease["silence_s"]))
    if len(leases) > WORKERS_SHOWN:
        held = sum(lease["holds"] for lease in leases[WORKERS_SHOWN:])
        table.add_row(f"[dim]{len(leases) - WORKERS_SHOWN} more", str(held), "")
    return table


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s ago"


def _oldest_ticket(ticket: Mapping[str, Any] | None) -> str:
    if ticket is None:
        return "oldest ticket   none"
    return f"oldest ticket   {ticket['id']} with {ticket['actor']}, heard {_ago(ticket['silence_s'])}"


def _disk(disk: Mapping[str, Any]) -> str:
    live, file, high_water = disk["live_bytes"], disk["file_bytes"], disk["high_water_bytes"]
    limit = f", tickets stop at {high_water / MIB:.0f} MiB ({live / high_water:.1%} used)" if high_water else ""
    return f"disk            {live / MIB:.1f} MiB in use of {file / MIB:.1f} MiB on disk{limit}"


def _reader(reader: Mapping[str, Any]) -> str:
    command = printable(reader["command"]) or "its command line cannot be seen"
    return (
        f"reader          process {reader['pid']} has read one snapshot for {reader['seconds']:.0f} s, and no space "
        f"is reused: {command}"
    )
