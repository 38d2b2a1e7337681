"""What each subcommand does with its arguments; returns the exit status."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import islice
from typing import Any

from rich.console import Console
from rich.live import Live as LiveTable
from rich.progress import MofNCompleteColumn, Progress

from asyncrl.errors import ConfigError, RefusedError
from asyncrl.inspect import dead_letters, episode, skipping
from asyncrl.inspect.status import Look, describe, look
from asyncrl.inspect.table import status_table
from asyncrl.inspect.target import Live, Target, find
from asyncrl.inspect.tokenizer import decoder, ids_as_text
from asyncrl.replay.records import TrajectoryState
from asyncrl.replay.store import Transaction
from asyncrl.replay.stored import StoredRun

STATUS_WAIT_S = 1.0
CHANGE_WAIT_S = 10.0
LOOKS = 6
"""Rates are those since the oldest of so many looks."""
NEIGHBOURS = 8


@contextmanager
def _opened(arguments: Namespace) -> Iterator[tuple[Target, StoredRun]]:
    target = find(arguments.run, arguments.store, arguments.endpoint, arguments.keys)
    with closing(StoredRun(target.folder)) as stored:
        yield target, stored


def status(arguments: Namespace) -> int:
    """A live table on a terminal; one print elsewhere, with --once and with --json."""
    console = Console()
    with _opened(arguments) as (target, stored):
        views = _views(target, stored, arguments.interval)
        if console.is_terminal and not (arguments.once or arguments.json):
            with suppress(KeyboardInterrupt), LiveTable(console=console, auto_refresh=False) as table:
                for view in views:
                    table.update(status_table(view), refresh=True)
            return 0
        view = next(views)
        if view["running"]:
            view = next(views)
    if arguments.json:
        _print_json(view)
    else:
        console.print(status_table(view))
    return 0


def _views(target: Target, stored: StoredRun, interval: float) -> Iterator[dict[str, Any]]:
    """The status now, and again after every interval."""
    live, high_water = Live(target, stored, STATUS_WAIT_S), _high_water_bytes(target)
    looks: deque[Look] = deque(maxlen=LOOKS)
    while True:
        looks.append(look(stored, live, time.monotonic()))
        yield describe(target.folder, looks[-1], looks[0] if len(looks) > 1 else None, high_water)
        time.sleep(interval)


def _high_water_bytes(target: Target) -> int | None:
    if target.config is None:
        return None
    # Reads task files, which takes longer to import than all the rest.
    from asyncrl.replay.from_config import high_water_bytes

    return high_water_bytes(target.config.replay) * target.config.replay.shards


def show(arguments: Namespace) -> int:
    """One episode."""
    name = arguments.id
    with _opened(arguments) as (target, stored):
        record = stored.record(name)
        if record.facts is None and record.dead_letter is None and record.trajectory is None:
            raise RefusedError(f"there is no trajectory {name}; {_others(stored, name)}")
    decode = decoder(target, arguments.tokenizer) if record.trajectory else ids_as_text
    if arguments.json:
        _print_json(episode.describe(name, record, decode))
    else:
        Console().print(episode.readable(name, record, decode), soft_wrap=True)
    return 0


def _others(stored: StoredRun, name: str) -> str:
    begin_like_it = [each for each in islice(stored.ids(after=name), NEIGHBOURS) if each.startswith(name)]
    others = begin_like_it or list(islice(stored.ids(), NEIGHBOURS))
    return f"do you mean {', '.join(others)}?" if others else "the store holds none; replay.retention=all keeps them"


def export(arguments: Namespace) -> int:
    """Write a run to Parquet."""
    from asyncrl.inspect.exporting import export_run

    unknown = sorted(set(arguments.state) - set(TrajectoryState))
    if unknown:
        raise ConfigError(f"--state {unknown[0]}: use one of {', '.join(TrajectoryState)}")
    with _opened(arguments) as (_, stored), _progress("exporting", sum(stored.each(Transaction.count, "data"))) as told:
        rows, planned = export_run(stored, arguments.to, arguments.state, told), stored.steps()
    sys.stdout.write(f"wrote {rows} trajectories and {planned} plans to {arguments.to}\n")
    return 0


def import_back(arguments: Namespace) -> int:
    """Make a store of an exported run."""
    from asyncrl.inspect.importing import count_rows, import_run

    with _progress("importing", count_rows(arguments.source)) as told:
        rows = import_run(arguments.source, arguments.to, told)
    sys.stdout.write(f"imported {rows} trajectories to {arguments.to}\n")
    return 0


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def list_letters(arguments: Namespace) -> int:
    """The dead letters of a run."""
    with _opened(arguments) as (_, stored):
        letters = stored.letters()
    if arguments.json:
        _print_json(dead_letters.describe(letters))
    else:
        Console().print(dead_letters.table(letters))
    return 0


def change_letters(arguments: Namespace) -> int:
    """Requeue or discard dead letters; status 1 where one was refused."""
    with _opened(arguments) as (target, stored):
        names = [name for name, _ in stored.letters()] if arguments.all else arguments.ids
        outcomes = arguments.change(Live(target, stored, CHANGE_WAIT_S), stored.shards, names)
    if not outcomes:
        sys.stdout.write("there are no dead letters\n")
    for outcome in outcomes:
        (sys.stderr if outcome.refused else sys.stdout).write(f"{outcome.id} {outcome.told}\n")
    return int(any(outcome.refused for outcome in outcomes))


def skip_plan(arguments: Namespace) -> int:
    """Have a recorded plan train nothing."""
    target = find(arguments.run, arguments.store, arguments.endpoint, arguments.keys)
    dead = skipping.skip_plan(target, arguments.step, arguments.reason, CHANGE_WAIT_S)
    sys.stdout.write(f"step {arguments.step} trains nothing; {dead} of its trajectories are dead letters now\n")
    return 0


def _print_json(values: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
