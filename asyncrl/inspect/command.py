"""`asyncrl inspect SUBCOMMAND`: look at the replay of a run, finished or running, and move its trajectories."""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
from rich.console import Console
from rich.live import Live
from rich.progress import MofNCompleteColumn, Progress

from asyncrl.config.commands import command_name
from asyncrl.errors import AsyncrlError, ConfigError, RefusedError
from asyncrl.inspect import changes, episode
from asyncrl.inspect.run import InspectedRun, LiveReplay, decoder, find, ids_as_text
from asyncrl.inspect.status import StatusSample, describe, sample
from asyncrl.inspect.table import dead_letter_table, describe_dead_letters, status_table
from asyncrl.replay.records import TrajectoryState
from asyncrl.replay.store import Transaction
from asyncrl.replay.stored import StoredRun

EXAMPLES = """examples:
  asyncrl inspect status --run runs/NAME              watch it; Ctrl-C ends
  asyncrl inspect show t000000012.3.0 --run runs/NAME
  asyncrl inspect export --to DIR --run runs/NAME     Parquet for pandas, polars and duckdb
  asyncrl inspect import --from DIR --to STORE        and back; then: asyncrl inspect show ID --store STORE
  asyncrl inspect requeue --all --run runs/NAME
docs/replay.md describes them.
"""
SAMPLES = 6
"""Rates are those since the oldest of so many samples."""
SUGGESTIONS = 8


def main() -> None:
    """Do what the command line says, then end the process: with a message and status 1 where it cannot be done."""
    parsed = parser().parse_args()
    try:
        sys.exit(parsed.act(parsed))
    except KeyboardInterrupt:
        sys.exit(130)
    except (AsyncrlError, OSError, lmdb.Error) as error:
        sys.stderr.write(f"{command_name()} {parsed.command}: {error}\n")
        sys.exit(1)


def parser() -> ArgumentParser:
    """The command line of all subcommands."""
    top = ArgumentParser(
        prog=command_name(),
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    run = ArgumentParser(add_help=False)
    run.add_argument("--run", help="folder of the run, such as runs/NAME, or its name")
    run.add_argument("--store", help="folder of its store instead, such as runs/NAME/replay or an imported one")
    run.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="tcp://HOST:PORT",
        help="address of the replay, once for each shard, where the run's folder has no config.yaml",
    )
    run.add_argument("--keys", metavar="DIR", help="keys to connect with, where the run's folder has no config.yaml")
    run.add_argument("--wait", type=float, default=10.0, metavar="S", help="seconds to wait for the replay (10)")
    plain = ArgumentParser(add_help=False, parents=[run])
    plain.add_argument("--json", action="store_true", help="print JSON for programs")

    def add(name: str, act: Callable[[Namespace], int], meaning: str, *parents: ArgumentParser) -> ArgumentParser:
        command = commands.add_parser(name, parents=parents, help=meaning)
        command.set_defaults(act=act)
        return command

    command = add("status", status, "rates, depths, lags, leases and disk, live", plain)
    command.add_argument("--once", action="store_true", help="print it once, with the rates of one interval")
    command.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two samples (1)")
    command = add("show", show, "one episode, turn by turn", plain)
    command.add_argument("id", metavar="ID", help="its id, such as t000000012.3.0")
    command.add_argument("--tokenizer", metavar="DIR", help="tokenizer, where the run's own is gone")
    add("dead-letters", dead_letters, "attempts that were given up, and why", plain)
    command = add("export", export, "all trajectories, plans and dead letters to Parquet", run)
    command.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to make")
    command.add_argument("--state", action="append", default=[], help="only those in this state, such as trained")
    command = add("import", import_back, "an exported run to a new store")
    command.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="folder of the export")
    command.add_argument("--to", type=Path, required=True, metavar="STORE", help="folder of the store to make")
    for name, change, meaning in (
        ("requeue", changes.requeue, "try dead letters again; the run must be running"),
        ("discard", changes.discard, "forget dead letters; the run must be running"),
    ):
        command = add(name, change_dead_letters, meaning, run)
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", nargs="*", default=[], metavar="ID", help="ids that dead-letters lists")
        which.add_argument("--all", action="store_true", help="every dead letter")
        command.set_defaults(change=change)
    command = add("skip-plan", skip_plan, "make a step train nothing, if its training fails every time", run)
    command.add_argument("step", type=int, metavar="STEP", help="the step, as the learner's error names it")
    command.add_argument("--reason", required=True, metavar="TEXT", help="why; recorded with the plan")
    return top


@contextmanager
def _opened(arguments: Namespace) -> Iterator[tuple[InspectedRun, StoredRun]]:
    run = _run(arguments)
    with closing(StoredRun(run.folder)) as stored:
        yield run, stored


def _run(arguments: Namespace) -> InspectedRun:
    return find(arguments.run, arguments.store, arguments.endpoint, arguments.keys)


def status(arguments: Namespace) -> int:
    """A live table on a terminal; one print elsewhere, with --once and with --json."""
    console = Console()
    with _opened(arguments) as (run, stored):
        views = _views(run.folder, LiveReplay(run, stored, arguments.wait), stored, arguments.interval)
        if console.is_terminal and not (arguments.once or arguments.json):
            with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as table:
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


def _views(folder: Path, live: LiveReplay, stored: StoredRun, interval: float) -> Iterator[dict[str, Any]]:
    """The status now, and again after every interval."""
    samples: deque[StatusSample] = deque(maxlen=SAMPLES)
    while True:
        samples.append(sample(stored, live, time.monotonic()))
        yield describe(folder, samples[-1], samples[0] if len(samples) > 1 else None)
        time.sleep(interval)


def show(arguments: Namespace) -> int:
    """One episode."""
    name = arguments.id
    with _opened(arguments) as (run, stored):
        record = stored.record(name)
        if record.facts is None and record.dead_letter is None and record.trajectory is None:
            raise RefusedError(f"there is no trajectory {name}; {_others(stored, name)}")
    decode = decoder(run, arguments.tokenizer) if record.trajectory else ids_as_text
    if arguments.json:
        _print_json(episode.describe(name, record, decode))
    else:
        Console().print(episode.readable(name, record, decode), soft_wrap=True)
    return 0


def _others(stored: StoredRun, name: str) -> str:
    begin_like_it = [each for each in islice(stored.ids(after=name), SUGGESTIONS) if each.startswith(name)]
    others = begin_like_it or list(islice(stored.ids(), SUGGESTIONS))
    return f"do you mean {', '.join(others)}?" if others else "the store holds none; replay.retention=all keeps them"


def export(arguments: Namespace) -> int:
    """Write a run to Parquet."""
    from asyncrl.inspect.parquet import export_run

    unknown = sorted(set(arguments.state) - set(TrajectoryState))
    if unknown:
        raise ConfigError(f"--state {unknown[0]}: use one of {', '.join(TrajectoryState)}")
    with (
        _opened(arguments) as (_, stored),
        _progress("exporting", sum(stored.each(Transaction.count, "data"))) as progress,
    ):
        rows, planned = export_run(stored, arguments.to, arguments.state, progress), stored.steps()
    sys.stdout.write(f"wrote {rows} trajectories and {planned} plans to {arguments.to}\n")
    return 0


def import_back(arguments: Namespace) -> int:
    """Make a store of an exported run."""
    from asyncrl.inspect.parquet import count_rows, import_run

    with _progress("importing", count_rows(arguments.source)) as progress:
        rows = import_run(arguments.source, arguments.to, progress)
    sys.stdout.write(f"imported {rows} trajectories to {arguments.to}\n")
    return 0


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def dead_letters(arguments: Namespace) -> int:
    """The dead letters of a run."""
    with _opened(arguments) as (_, stored):
        letters = stored.dead_letters()
    if arguments.json:
        _print_json(describe_dead_letters(letters))
    else:
        Console().print(dead_letter_table(letters))
    return 0


def change_dead_letters(arguments: Namespace) -> int:
    """Requeue or discard dead letters; status 1 where one was refused."""
    with _opened(arguments) as (run, stored):
        names = [name for name, _ in stored.dead_letters()] if arguments.all else arguments.ids
        live = LiveReplay(run, stored, arguments.wait)
    if not names:
        sys.stdout.write("there are no dead letters\n")
    refused = False
    for result in changes.change_all(live, names, arguments.change):
        (sys.stderr if result.refused else sys.stdout).write(f"{result.id} {result.text}\n")
        refused |= result.refused
    return int(refused)


def skip_plan(arguments: Namespace) -> int:
    """Make a recorded plan train nothing."""
    dead = changes.skip_plan(_run(arguments), arguments.step, arguments.reason, arguments.wait)
    sys.stdout.write(f"step {arguments.step} trains nothing; {dead} of its trajectories are dead letters now\n")
    return 0


def _print_json(values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
