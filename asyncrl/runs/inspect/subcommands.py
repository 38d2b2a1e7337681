"""The subcommands of `asyncrl inspect`: each prints one view of a run, or moves or changes its trajectories."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from asyncrl.errors import ConfigError, RefusedError
from asyncrl.machine.long_work import long_work, print_line
from asyncrl.replay.store.records import TrajectoryState
from asyncrl.replay.store.transaction import Transaction
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.decoding import Decode, decoder, ids_as_text
from asyncrl.runs.finding import run_with_store
from asyncrl.runs.inspect import changes, episode
from asyncrl.runs.inspect.episodes import answer, list_episodes, required_plan, step_row
from asyncrl.runs.inspect.kept import KeptOfRun, filled
from asyncrl.runs.inspect.table import (
    change_table,
    dead_letter_table,
    describe_dead_letters,
    episode_table,
    status_table,
    step_view,
)
from asyncrl.runs.progress import RunProgress
from asyncrl.runs.run import Run
from asyncrl.runs.state.live import LiveReplay
from asyncrl.runs.state.status import StatusSample, describe, sample
from asyncrl.runs.state.watch import StallReader

MOST_REASONS = 20
SAMPLES = 6
"""The number of samples of the status that are kept. Rates are measured from the oldest sample to the newest."""
SUGGESTIONS = 8
WIDE = 300
LEAST_WIDTH = 120


@contextmanager
def _opened(arguments: Namespace) -> Iterator[tuple[Run, StoredRun]]:
    run = _run(arguments)
    with run.stored() as stored:
        yield run, stored


def _run(arguments: Namespace) -> Run:
    """The run that the arguments name. Raises ConfigError or StoreError: it does not exist, or another version of
    asyncrl wrote it."""
    if arguments.named and (arguments.run or arguments.store):
        raise ConfigError(f"the run is named twice: leave out {arguments.named}, or --run and --store")
    run = run_with_store(arguments.named or arguments.run, arguments.store)
    # A store of another version is refused before anything of it is read.
    run.settings()
    return run


def _live(arguments: Namespace, run: Run, stored: StoredRun) -> LiveReplay:
    return LiveReplay(run, stored, arguments.wait, arguments.endpoint, arguments.keys)


def status(arguments: Namespace) -> int:
    """Show a live table on a terminal. Elsewhere, and with --once or --json, print the status once."""
    console = Console()
    with _opened(arguments) as (run, stored):
        views = _views(run, _live(arguments, run, stored), stored, arguments.interval)
        if console.is_terminal and not (arguments.once or arguments.json):
            with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as table:
                for view in views:
                    table.update(status_table(view), refresh=True)
            return 0
        view = next(views)
        # Rates need a second sample. It is left out if a shard does not answer: that shard would be waited for again.
        if view["running"] and not view["problem"]:
            view = next(views)
    # Without a terminal, lines are not wrapped, so that commands in them can be copied.
    return _print(arguments, view, lambda: status_table(view), console, soft_wrap=not console.is_terminal)


def _views(run: Run, live: LiveReplay, stored: StoredRun, interval: float) -> Iterator[dict[str, Any]]:
    """The status now, and again after every interval."""
    samples: deque[StatusSample] = deque(maxlen=SAMPLES)
    progress, stalls, settings = RunProgress(run), StallReader(run), run.settings()
    steps = settings.steps if settings else None
    while True:
        samples.append(sample(stored, live, time.monotonic()))
        before = samples[0] if len(samples) > 1 else None
        found = stalls.read(samples[-1], settings)
        yield describe(run, samples[-1], before, progress, steps) | found.values()
        time.sleep(interval)


def list_rows(arguments: Namespace) -> int:
    """Print a table of episodes, one per line."""
    _check_states(arguments.state)
    with _opened(arguments) as (_, stored):
        rows = list_episodes(
            stored,
            step=arguments.step,
            evaluation=arguments.evaluation,
            states=arguments.state,
            sort=arguments.sort,
            reverse=arguments.reverse,
            limit=arguments.limit or None,
        )
    more = f"the first {len(rows)}; --limit N shows more, --limit 0 all" if len(rows) == arguments.limit else ""
    table = episode_table(rows) if rows else "no episodes match"
    lines = Group(table, *([Text(more, "dim")] if more else []))
    return _print(arguments, [asdict(row) for row in rows], lambda: lines, _wide_console())


def step(arguments: Namespace) -> int:
    """Print a learner step, with the ends of its best and worst episodes."""
    with _opened(arguments) as (run, stored):
        summary = step_row(stored, required_plan(stored, arguments.step))
        rows = list_episodes(stored, step=arguments.step, sort="reward")
        best, worst = rows[: arguments.best], rows[max(arguments.best, len(rows) - arguments.best) :][::-1]
        decode = decoder(run, arguments.tokenizer)
        kept = KeptOfRun(run)
        parts = {
            name: [(row, _answer(stored, kept, row.id, decode)) for row in part]
            for name, part in (("best", best), ("worst", worst))
        }
        groups = kept.groups(arguments.step)
    found = {name: [{**asdict(row), "answer": text} for row, text in part] for name, part in parts.items()}
    values = {**asdict(summary), **found, "kept_groups": groups}
    return _print(arguments, values, lambda: step_view(summary, parts, groups), soft_wrap=True)


def _answer(stored: StoredRun, kept: KeptOfRun, name: str, decode: Decode) -> str | None:
    trajectory = stored.trajectory(name)
    if trajectory is None and (found := kept.find(name)) is not None:
        trajectory = found.trajectory
    return None if trajectory is None else answer(trajectory, decode)


def _check_states(states: Sequence[str]) -> None:
    unknown = sorted(set(states) - set(TrajectoryState))
    if unknown:
        raise ConfigError(f"--state {unknown[0]}: use one of {', '.join(TrajectoryState)}")


def _wide_console() -> Console:
    """A console for rows of any length.

    A file or a pipe gets each row as one line. A narrow terminal wraps the lines of a wide table,
    because a table that fits would cut off the ends of ids.
    """
    console = Console()
    return Console(width=max(LEAST_WIDTH, console.width) if console.is_terminal else WIDE)


def show(arguments: Namespace) -> int:
    """Print one episode."""
    name = arguments.id
    with _opened(arguments) as (run, stored):
        record = stored.record(name)
        kept = KeptOfRun(run).find(name)
        record = filled(record, kept)
        if record.facts is None and record.dead_letter is None and record.trajectory is None:
            raise RefusedError(f"there is no trajectory {name}; {_others(stored, name)}")
    decode = decoder(run, arguments.tokenizer) if record.trajectory else ids_as_text
    described = episode.describe(record, decode, kept) if arguments.json else {}
    return _print(arguments, described, lambda: episode.readable(record, decode, kept), soft_wrap=True)


def _others(stored: StoredRun, name: str) -> str:
    for length in range(len(name), -1, -1):
        begin = name[:length]
        others = [each for each in islice(stored.ids(after=begin), SUGGESTIONS) if each.startswith(begin)]
        if others:
            return f"do you mean {', '.join(others)}?"
    return "the store has no trajectory any more; replay.retention=all keeps all"


def export(arguments: Namespace) -> int:
    """Write a run to Parquet."""
    from asyncrl.runs.inspect.parquet import export_run

    _check_states(arguments.state)
    with (
        _opened(arguments) as (run, stored),
        long_work(
            "exporting", sum(stored.each(Transaction.count, "trajectories")), "episodes", say=print_line
        ) as progress,
    ):
        decode = decoder(run, arguments.tokenizer)
        texts = None if decode is ids_as_text else decode
        rows, planned = export_run(stored, arguments.to, arguments.state, progress, decode=texts), stored.steps()
    sys.stdout.write(f"wrote {rows} trajectories and {planned} steps to {arguments.to}\n")
    return 0


def import_back(arguments: Namespace) -> int:
    """Make a store from an exported run."""
    from asyncrl.runs.inspect.importing import count_rows, import_run

    with long_work("importing", count_rows(arguments.source), "episodes", say=print_line) as progress:
        rows = import_run(arguments.source, arguments.to, progress)
    sys.stdout.write(f"imported {rows} trajectories to {arguments.to}\n")
    return 0


def config_changes(arguments: Namespace) -> int:
    """Print the changes of a run's configuration."""
    with _opened(arguments) as (_, stored):
        found = stored.changes()
    return _print(arguments, [asdict(each) for each in found], lambda: change_table(found))


def dead_letters(arguments: Namespace) -> int:
    """Print the dead letters of a run."""
    with _opened(arguments) as (_, stored):
        letters = stored.dead_letters()
    limit = MOST_REASONS if arguments.limit is None else arguments.limit
    if arguments.json and arguments.limit:
        letters = sorted(letters, key=lambda each: each[1].order, reverse=True)[:limit]
    return _print(arguments, describe_dead_letters(letters), lambda: dead_letter_table(letters, limit))


def change_dead_letters(arguments: Namespace) -> int:
    """Requeue or discard dead letters. The exit status is 1 if the replay refused one."""
    # Together with --run or --store, all other words are ids.
    if arguments.named and (arguments.run or arguments.store):
        arguments.ids, arguments.named = [arguments.named, *arguments.ids], None
    if bool(arguments.ids) == arguments.all:
        raise ConfigError("name dead letters by their ids, or use --all")
    with _opened(arguments) as (run, stored):
        names = [name for name, _ in stored.dead_letters()] if arguments.all else arguments.ids
        live = _live(arguments, run, stored)
    if not names:
        sys.stdout.write("there are no dead letters\n")
    refused = False
    for result in changes.change_all(live, names, arguments.change):
        (sys.stderr if result.refused else sys.stdout).write(f"{result.id} {result.text}\n")
        refused |= result.refused
    return int(refused)


def skip_plan(arguments: Namespace) -> int:
    """Make a recorded plan train nothing."""
    run = _run(arguments)
    dead = changes.skip_plan(run, arguments.step, arguments.reason, partial(_live, arguments, run))
    sys.stdout.write(f"step {arguments.step} trains nothing; {dead} of its trajectories are dead letters now\n")
    return 0


def _print(
    arguments: Namespace,
    values: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    readable: Callable[[], RenderableType],
    console: Console | None = None,
    soft_wrap: bool = False,
) -> int:
    """Print plain values as JSON with `--json`, else the readable form. Returns the exit status."""
    if arguments.json:
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        (console or Console()).print(readable(), soft_wrap=soft_wrap)
    return 0
