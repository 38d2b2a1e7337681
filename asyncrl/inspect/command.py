"""`asyncrl replay SUBCOMMAND`: look into the replay of a run, finished or at work, and move its trajectories about."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import lmdb

from asyncrl.errors import AsyncrlError
from asyncrl.inspect import actions, dead_letters

EXAMPLES = """examples:
  asyncrl replay status --run runs/NAME              watch it; Ctrl-C ends
  asyncrl replay show t000000012.3.0 --run runs/NAME
  asyncrl replay export --to DIR --run runs/NAME     Parquet for pandas, polars and duckdb
  asyncrl replay import --from DIR --to STORE        and back; then: asyncrl replay show ID --store STORE
  asyncrl replay requeue --all --run runs/NAME
docs/replay.md tells more.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of all subcommands."""
    top = argparse.ArgumentParser(
        prog="asyncrl replay",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    _add_reading(commands)
    _add_parquet(commands)
    _add_changing(commands)
    return top


def _run_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--run", help="folder of the run, such as runs/NAME, or its name")
    options.add_argument("--store", help="folder of its store instead, such as runs/NAME/replay or an imported one")
    options.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="tcp://HOST:PORT",
        help="address of the replay, once for each shard, where no config.yaml in the run's folder tells it",
    )
    options.add_argument("--keys", metavar="DIR", help="keys to connect with, where config.yaml does not tell them")
    return options


def _add_reading(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plain = argparse.ArgumentParser(add_help=False, parents=[_run_options()])
    plain.add_argument("--json", action="store_true", help="print JSON for programs")
    status = commands.add_parser("status", parents=[plain], help="rates, depths, lags, leases and disk, live")
    status.add_argument("--once", action="store_true", help="print it once; its rates are those of one interval")
    status.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    status.set_defaults(act=actions.status)
    show = commands.add_parser("show", parents=[plain], help="one episode, turn by turn")
    show.add_argument("id", metavar="ID", help="its id, such as t000000012.3.0")
    show.add_argument("--tokenizer", metavar="DIR", help="tokenizer, where the run's own is gone")
    show.set_defaults(act=actions.show)
    letters = commands.add_parser("dead-letters", parents=[plain], help="attempts that were given up, and why")
    letters.set_defaults(act=actions.list_letters)


def _add_parquet(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    out = commands.add_parser(
        "export", parents=[_run_options()], help="all trajectories, plans and dead letters to Parquet"
    )
    out.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to make")
    out.add_argument("--state", action="append", default=[], help="only trajectories in this state, such as trained")
    out.set_defaults(act=actions.export)
    back = commands.add_parser("import", help="an exported run to a new store")
    back.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="folder that export made")
    back.add_argument("--to", type=Path, required=True, metavar="STORE", help="folder of the store to make")
    back.set_defaults(act=actions.import_back)


def _add_changing(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, change, meaning in (
        ("requeue", dead_letters.requeue, "put dead letters back; the run must be at work"),
        ("discard", dead_letters.discard, "forget dead letters; the run must be at work"),
    ):
        command = commands.add_parser(name, parents=[_run_options()], help=meaning)
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", nargs="*", default=[], metavar="ID", help="ids that dead-letters lists")
        which.add_argument("--all", action="store_true", help="every dead letter")
        command.set_defaults(act=actions.change_letters, change=change)
    skip = commands.add_parser(
        "skip-plan", parents=[_run_options()], help="have a step train nothing whose plan fails again and again"
    )
    skip.add_argument("step", type=int, metavar="STEP", help="the step, as the learner's error names it")
    skip.add_argument("--reason", required=True, metavar="TEXT", help="why; recorded with the plan")
    skip.set_defaults(act=actions.skip_plan)


def main(arguments: Sequence[str]) -> None:
    """Do what the command line says, then end the process: with a message and status 1 where it cannot be done."""
    parsed = parser().parse_args(arguments)
    try:
        sys.exit(parsed.act(parsed))
    except KeyboardInterrupt:
        sys.exit(130)
    except (AsyncrlError, OSError, lmdb.Error) as error:
        sys.stderr.write(f"asyncrl replay {parsed.command}: {error}\n")
        sys.exit(1)
