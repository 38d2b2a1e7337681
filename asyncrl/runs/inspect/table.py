"""Makes tables for a terminal: the status of a replay, episodes, a learner step, and dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import structs
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.config.changes import ConfigChange
from asyncrl.config.secrets import shown_value
from asyncrl.replay.store.records import DeadLetter
from asyncrl.runs.failures import group_failures, shown_end
from asyncrl.runs.inspect.episodes import EpisodeRow, StepRow
from asyncrl.runs.progress import progress_rows
from asyncrl.runs.state.advice import FINE
from asyncrl.text import printable

WORKERS_SHOWN = 16
SHOWN_CHARACTERS = 300
NEWEST_IDS = 3
MIB = 1 << 20
REASONS = {"dead_letters": "{} dead letters", "evicted": "evicted", "filtered": "filtered groups"}
"""The names of counts by reason, and the title of the table of each; the sum of the counts replaces `{}`. A table in
which all counts are 0 is not shown."""


def describe_dead_letters(letters: Iterable[tuple[str, DeadLetter]]) -> list[dict[str, Any]]:
    """Dead letters, the records of failed attempts, as plain values. `attempts` is the number of times that the group
    member has failed so far."""
    return [{"id": name, **structs.asdict(letter), "attempts": letter.attempt + 1} for name, letter in letters]


def dead_letter_table(letters: Sequence[tuple[str, DeadLetter]], limit: int) -> Table:
    """Dead letters by reason for a terminal: the `limit` most frequent reasons, or all if `limit` is 0."""
    groups = group_failures(letters)
    shown = groups[: limit or None]
    title = f"{len(letters)} dead letters with {len(groups)} reasons"
    if len(shown) < len(groups):
        title += f", of which the {len(shown)} most frequent (--limit 0: all)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("count", header_style="dim", justify="right", no_wrap=True)
    for column in ("failed in", "newest ids", "reason"):
        table.add_column(column, header_style="dim", no_wrap=column == "newest ids")
    for group in shown:
        failed_in = "scoring" if group.scoring else "episode"
        ids = "\n".join(group.ids[:NEWEST_IDS])
        table.add_row(str(len(group.ids)), failed_in, ids, Text(printable(group.reason)))
    return table


def episode_table(rows: Iterable[EpisodeRow]) -> Table:
    """A table with a line per episode."""
    table = Table(box=None, pad_edge=False)
    for column in ("id", "state", "step"):
        table.add_column(column, header_style="dim", no_wrap=True)
    for column in ("reward", "outcome", "lag", "tokens", "turns", "seconds"):
        table.add_column(column, header_style="dim", justify="right", no_wrap=True)
    for column in ("finish", "data source", "reason"):
        table.add_column(column, header_style="dim", no_wrap=True, overflow="ellipsis")
    for row in rows:
        numbers = (row.reward, row.outcome, row.lag, row.tokens, row.turns, row.seconds)
        texts = (row.finish, row.data_source, row.reason)
        table.add_row(
            row.id,
            row.state,
            _number(row.step),
            *map(_number, numbers),
            *(Text(" ".join(printable(text).split())) for text in texts),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def step_view(
    step: StepRow, parts: Mapping[str, Sequence[tuple[EpisodeRow, str | None]]], kept: Sequence[str] = ()
) -> RenderableType:
    """A learner step for a terminal. `parts` has lists of episodes by title. Each episode comes with its last answer,
    or `None` if its text was removed. Only the end of an answer is shown. The texts of the `kept` groups still
    exist."""
    head = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "step": f"{step.step}, at version {step.version}",
        "skipped": step.skipped,
        "episodes": f"{step.episodes} in {step.groups} groups, {step.truncated} truncated",
        "tokens": f"{step.tokens}, of which {step.sampled} sampled{masked_tokens_text(step.masked)}",
        "reward": f"{step.reward_mean:.4g} on average, from {step.reward_min:.4g} to {step.reward_max:.4g}",
        "outcome": f"{step.outcome_mean:.4g} on average",
        "lag": f"{step.lag_mean:.3g} on average, at most {step.lag_max}",
        "turns": f"{step.turns_mean:.3g} on average",
        "seconds": f"{step.seconds_mean:.3g} on average",
        "kept": ", ".join(kept),
    }
    for key, value in rows.items():
        if value:
            head.add_row(Text(key, "dim"), Text(printable(value)))
    lines: list[RenderableType] = [head]
    for name, part in parts.items():
        lines.append(Text(f"\n{name}", "bold"))
        for row, end in part:
            numbers = {"reward": row.reward, "outcome": row.outcome, "lag": row.lag, "turns": row.turns}
            masked = [f"masked {row.masked}"] if row.masked else []
            shown = (row.id, *(f"{key} {_number(numbers[key])}" for key in numbers), *masked, row.finish)
            lines.append(Text("   ".join(shown)))
            lines.append(Text(f"  {_ending(end)}", "dim" if end is None else "green"))
    return Group(*lines)


def masked_tokens_text(tokens: int) -> str:
    """The number of masked tokens as the end of a sentence; empty if there are none."""
    return f"; {tokens} of these are masked, since they are too old" if tokens else ""


def _ending(text: str | None) -> str:
    if text is None:
        return "its text was removed; replay.retention=all keeps all texts, observe.keep_episodes those of a few groups"
    cut = "..." if len(text) > SHOWN_CHARACTERS else ""
    return cut + printable(text[-SHOWN_CHARACTERS:]).replace("\n", "\n  ")


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """The values of `status.describe`, for a terminal."""
    queues = dict(status["depths"])
    if status["running"]:
        queues["admitted"] = f"{status['admission']['committed']}/{status['admission']['capacity']}"
        queues["rejected"] = status["failed_handshakes"]
    rates = {name: f"{rate:.1f}" for name, rate in (status["rates"] or {}).items() if name in status["totals"]}
    lags = sorted({lag for counts in status["lags"].values() for lag in counts})
    by_lag = {name: {lag: counts.get(lag, 0) for lag in lags} for name, counts in status["lags"].items()}
    leases = status["leases"][:WORKERS_SHOWN]
    blocks = [
        _table("trajectories", {"total": status["totals"], "a second": rates, "tokens": status["tokens"]}, shown_end),
        _table("by state", {"": status["states"]}, shown_end),
        _table("queues", {"": queues}),
        *(
            _table(title.format(sum(status[name].values())), {"": status[name]})
            for name, title in REASONS.items()
            if any(status[name].values())
        ),
        _table("by lag", by_lag),
        *_decided(status),
    ]
    more = len(status["leases"]) - len(leases)
    return Group(
        _title(status),
        *_progress(status["progress"]),
        *_health(status),
        *stall_lines(status),
        Columns(blocks, padding=(1, 4)),
        _table(
            "leases",
            {
                "holds": {_worker(each): each["holds"] for each in leases},
                "heard": {_worker(each): _ago(each["silence_s"]) for each in leases},
            },
        ),
        *([f"and {more} more"] if more else []),
        *([_processes(status["processes"])] if status["processes"] else []),
        "",
        Text(_oldest_ticket(status["oldest_ticket"])),
        Text(_disk(status["disk"])),
        *(Text(_reader(each), "yellow") for each in status["readers"]),
        *(Text(printable(f"failing         {each}"), "yellow") for each in status["failing"]),
    )


def _decided(status: Mapping[str, Any]) -> list[Table]:
    """Tables of the decided episodes (`asyncrl.replay.batches.selection`): the means for each end (trained, evicted and
    so on), and the number of episodes by length. No table if no episode is decided."""
    keys = ("decided", "by_length")
    decided, by_length = ({shown_end(end): each for end, each in status[key].items()} for key in keys)
    means = {end: {name: _number(mean) for name, mean in each.items()} for end, each in decided.items()}
    if not means:
        return []
    marks = sorted({length for counts in by_length.values() for length in counts})
    lengths = {end: {length: counts.get(length, 0) for length in marks} for end, counts in by_length.items()}
    return [_table("decided episodes", means), _table("by length", lengths, lambda length: f"from {length}")]


def _progress(progress: Mapping[str, Any]) -> list[Columns]:
    """The line of values that the run's own terminal shows; none for a store without a run."""
    rows = progress_rows(progress, progress["steps"]) if progress["steps"] is not None else []
    # A narrow terminal shows several lines, and breaks none of the values.
    return [Columns([Text(f"{name} {value}", no_wrap=True) for name, value in rows], padding=(0, 3))] if rows else []


def _health(status: Mapping[str, Any]) -> list[Text]:
    """A line for each warning and each remark."""
    lines = [("warning", text, "yellow") for text in status["warnings"]]
    lines += [("remark", text, "bold") for text in status["remarks"]]
    return [Text(f"{name:<9}{printable(text)}", style) for name, text, style in lines]


def stall_lines(status: Mapping[str, Any]) -> list[Text]:
    """Lines with the newest errors of roles, with the chain of waits, and with the advice."""
    waits = [("error", text, "red") for text in status["errors"]]
    waits += [("waits", status["waits_text"], "yellow")] if status["waits_text"] else []
    advice = status["advice"]
    if advice is not None:
        waits += [("advice", text, "") for text in advice] or [("advice", FINE, "dim")]
    return [Text(f"{name:<8}{printable(text)}", style) for name, text, style in waits]


def _processes(processes: Mapping[str, Any]) -> Table:
    """A table of the host, the process and the restarts of each role. In a large run it has only roles that were
    restarted or do not run."""
    shown = processes
    if len(processes) > WORKERS_SHOWN:
        shown = {name: each for name, each in processes.items() if each["restarts"] or not each["pid"]}
    columns = {
        "host": {name: each["host"] or "waits for room" for name, each in shown.items()},
        "process": {name: str(each["pid"] or "-") for name, each in shown.items()},
        "restarts": {name: str(each["restarts"]) for name, each in shown.items()},
    }
    return _table(f"{len(processes)} processes", columns)


def change_table(changes: Sequence[ConfigChange]) -> Table:
    """Changes of the configuration for a terminal."""
    table = Table(title=f"{len(changes)} changes of the configuration", title_justify="left", box=None, pad_edge=False)
    for column in ("from step", "key", "before", "since then", "changed at"):
        table.add_column(column, header_style="dim", no_wrap=column == "key")
    for each in changes:
        at = datetime.fromtimestamp(each.time).isoformat(" ")
        values = (Text(printable(shown_value(each.key, value))) for value in (each.old, each.new))
        table.add_row(str(each.step), each.key, *values, at)
    return table


def _title(status: Mapping[str, Any]) -> Text:
    title = Text(status["store"], "bold")
    title.append(f"\nversion {status['version']}   {status['steps']} steps planned   ", "not bold")
    if status["problem"] is None:
        return title.append("running", "green")
    title.append("running in part" if status["running"] else "not running", "yellow")
    return title.append(f"   {status['problem']}", "dim")


def _table(title: str, columns: Mapping[str, Mapping[Any, object]], shown: Callable[[str], str] = str) -> Table:
    """A table with a row for each key of the columns. `shown` returns the name of a row."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(["", *columns]):
        table.add_column(column, justify="right" if index else "left", header_style="dim")
    for row in dict.fromkeys(key for column in columns.values() for key in column):
        table.add_row(Text(printable(shown(str(row)))), *(str(column.get(row, "-")) for column in columns.values()))
    return table


def _worker(lease: Mapping[str, Any]) -> str:
    return f"{lease['kind'][:-1]} {lease['worker']}"


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s ago"


def _oldest_ticket(ticket: Mapping[str, Any] | None) -> str:
    if ticket is None:
        return "oldest ticket   none"
    return f"oldest ticket   {ticket['id']} with {ticket['actor']}, heard {_ago(ticket['silence_s'])}"


def _disk(disk: Mapping[str, Any]) -> str:
    live, file, high_water = disk["live_bytes"], disk["file_bytes"], disk["high_water_bytes"]
    limit = f", tickets stop at {high_water / MIB:.0f} MiB ({live / high_water:.1%} used)" if high_water else ""
    full = "; raise replay.max_store_gb, or set another replay.retention" if high_water and live > high_water else ""
    return f"disk            {live / MIB:.1f} MiB in use of {file / MIB:.1f} MiB on disk{limit}{full}"


def _reader(reader: Mapping[str, Any]) -> str:
    command = printable(reader["command"]) or "(its command line cannot be seen)"
    return (
        f"reader          process {reader['pid']} has read one snapshot for {reader['seconds']:.0f} s, so the store "
        f"cannot reuse space: {command}"
    )
