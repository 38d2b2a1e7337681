"""`asyncrl inspect SUBCOMMAND`: look at the replay of a run, finished or running, and move its trajectories."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import lmdb

from asyncrl.config.commands import command_name
from asyncrl.config.exits import exit_status
from asyncrl.errors import StoreError
from asyncrl.runs.inspect import changes, subcommands
from asyncrl.runs.inspect.episodes import SORT_KEYS

EXAMPLES = """examples:
  asyncrl inspect status runs/NAME                watch it; Ctrl-C ends
  asyncrl inspect list runs/NAME --sort reward    one line per episode, the best first
  asyncrl inspect step runs/NAME 5                the best and the worst of a learner step
  asyncrl inspect show runs/NAME t000000012.3.0   one episode, turn by turn
  asyncrl inspect export runs/NAME --to DIR       Parquet for pandas, polars and duckdb
  asyncrl inspect import --from DIR --to STORE    back to a store; then: asyncrl inspect show ID --store STORE
  asyncrl inspect requeue runs/NAME --all
RUN is the folder of a run or its name. docs/replay.md describes the subcommands.
"""
FOLLOWS = (
    " It shows how far a run is, which role waits for which, and what to change. On a terminal it follows the run "
    "until Ctrl-C, which does not end the run; --once prints the status once. `asyncrl status` and "
    "`asyncrl inspect status` are the same command."
)
Add = Callable[..., ArgumentParser]
"""Adds a subcommand. The arguments are its name, its function, its help text, and the parsers of its shared options."""
LETTERS = " --json prints each attempt instead, and with --limit only the N newest ones."


def main(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit status. Raises StoreError: the store cannot be read."""
    parsed = parser().parse_args(argv)
    try:
        status: int = parsed.act(parsed)
    except lmdb.Error as error:
        raise StoreError(str(error)) from error
    return status


def _shared_options() -> tuple[ArgumentParser, ArgumentParser, ArgumentParser, ArgumentParser]:
    """The options that several subcommands have: the run; the run and --json; the state of episodes; the tokenizer."""
    run = ArgumentParser(add_help=False)
    run.add_argument("named", nargs="?", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    run.add_argument("--run", help="the run, as an option")
    run.add_argument("--store", help="instead of a run: a store, such as runs/NAME/replay or an imported one")
    run.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="tcp://HOST:PORT",
        help="address of the replay, once for each shard; by default the address in the folder of the store",
    )
    run.add_argument("--keys", metavar="DIR", help="folder of keys, if the run's folder has no config.yaml")
    run.add_argument("--wait", type=float, default=10.0, metavar="S", help="seconds to wait for the replay (10)")
    plain = ArgumentParser(add_help=False, parents=[run])
    plain.add_argument("--json", action="store_true", help="print JSON for programs")
    tokenizer = ArgumentParser(add_help=False)
    tokenizer.add_argument("--tokenizer", metavar="DIR", help="folder of a tokenizer, if the run's own is missing")
    state = ArgumentParser(add_help=False)
    state.add_argument(
        "--state", action="append", default=[], help="only episodes in this state, such as evicted; may be repeated"
    )
    return run, plain, state, tokenizer


def parser() -> ArgumentParser:
    """The command line of all subcommands."""
    top = ArgumentParser(
        prog=command_name(),
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    run, plain, state, tokenizer = _shared_options()

    def add(
        name: str, act: Callable[[Namespace], int], meaning: str, *parents: ArgumentParser, more: str = ""
    ) -> ArgumentParser:
        about = f"{meaning[0].upper()}{meaning[1:]}.{more}"
        command = commands.add_parser(name, parents=parents, help=meaning, description=about)
        command.set_defaults(act=act)
        return command

    _add_views(add, plain, state, tokenizer)
    _add_changes(add, run, state, tokenizer)
    return top


def _add_views(add: Add, plain: ArgumentParser, state: ArgumentParser, tokenizer: ArgumentParser) -> None:
    """Add the subcommands that print something."""
    command = add("status", subcommands.status, "rates, queues, lags, leases and disk, live", plain, more=FOLLOWS)
    command.add_argument("--once", action="store_true", help="print the status once, with the rates of one interval")
    command.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two samples (1)")
    command = add("list", subcommands.list_rows, "one line per episode", plain, state)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="only episodes of this learner step")
    which.add_argument("--evaluation", type=int, metavar="VERSION", help="only held-out episodes of this version")
    command.add_argument("--sort", choices=SORT_KEYS, help="the largest first; by default the newest ids first")
    command.add_argument("--reverse", action="store_true", help="the smallest, or the oldest ids, first")
    command.add_argument("--limit", type=_count, default=20, metavar="N", help="at most N episodes (20); 0: all")
    command = add(
        "step", subcommands.step, "a learner step, and how its best and its worst episodes end", plain, tokenizer
    )
    command.add_argument("step", type=int, metavar="STEP", help="number of the step")
    command.add_argument("--best", type=_count, default=3, metavar="N", help="the N best and the N worst episodes (3)")
    command = add("show", subcommands.show, "one episode, turn by turn", plain, tokenizer)
    command.add_argument("id", metavar="ID", help="id of the episode, such as t000000012.3.0")
    add(
        "changes",
        subcommands.config_changes,
        "keys of the configuration that changed when the run resumed, and when",
        plain,
    )
    command = add(
        "dead-letters", subcommands.dead_letters, "attempts that were given up, by reason", plain, more=LETTERS
    )
    command.add_argument("--limit", type=_count, metavar="N", help="at most N reasons (20); 0: all")


def _add_changes(add: Add, run: ArgumentParser, state: ArgumentParser, tokenizer: ArgumentParser) -> None:
    """Add the subcommands that write a copy of a run, or change it."""
    about = "write all episodes, steps, plans and dead letters to Parquet"
    command = add("export", subcommands.export, about, run, state, tokenizer)
    command.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to make")
    command = add("import", subcommands.import_back, "make a new store from an exported run")
    command.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="folder of the export")
    command.add_argument("--to", type=Path, required=True, metavar="STORE", help="folder of the store to make")
    for name, change, meaning in (
        ("requeue", changes.requeue, "try dead letters again; the run must be running"),
        ("discard", changes.discard, "delete dead letters; the run must be running"),
    ):
        command = add(name, subcommands.change_dead_letters, meaning, run)
        command.add_argument(
            "ids", nargs="*", default=[], metavar="ID", help="ids, as `asyncrl inspect dead-letters` shows them"
        )
        command.add_argument("--all", action="store_true", help="every dead letter")
        command.set_defaults(change=change)
    command = add(
        "skip-plan", subcommands.skip_plan, "make a step train nothing, if its training fails every time", run
    )
    command.add_argument("step", type=int, metavar="STEP", help="the step, as the learner's error names it")
    command.add_argument("--reason", required=True, metavar="TEXT", help="why; recorded with the plan")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError("it must be 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl inspect"))
