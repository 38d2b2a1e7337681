"""`asyncrl data SET`: makes a task file from a published data set on this machine, or from an environment's tasks.

For a few sets it also makes demonstrations of their tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.keys import did_you_mean
from asyncrl.data.converters import (
    dapo,
    gsm8k,
    gym,
    math_problems,
    nemo_gym,
    openenv,
    programs,
    reasoning_gym,
    search,
    tool_calls,
    verifiers,
)
from asyncrl.data.converters.calculator_calls import LeftOut
from asyncrl.data.json_rows import JSON_SUFFIXES
from asyncrl.data.writing import write_conversations, write_tasks
from asyncrl.errors import DataError
from asyncrl.machine.long_work import long_work, print_line
from asyncrl.types import Task

SETS: Mapping[str, str] = {
    "gsm8k": "GSM8K: question, answer that ends in #### N; rule gsm8k",
    "math": "MATH: problem, solution with \\boxed; rule math (asyncrl[math])",
    "dapo": "DAPO-Math-17k: verl's layout, each problem kept once; rule exact_number",
    "search": "HotpotQA and similar sets: question, golden_answers or answer; rule f1",
    "code": "APPS, TACO and similar sets: question, input_output; rule code",
    "tools": "xLAM and similar sets: query, tools, answers; rule tool_calls",
    "reasoning-gym": "tasks that reasoning-gym makes (asyncrl[reasoning-gym]); rule reasoning_gym",
    "verifiers": "tasks of a verifiers environment, which is installed in another Python (docs/environments.md)",
    "gym": "games of textarena, gem and others, installed in another Python (docs/environments.md); rule environment",
    "openenv": "tasks of an OpenEnv server (docs/environments.md); rule environment",
    "nemo-gym": "tasks of NeMo Gym for a resources server (docs/environments.md); rule environment",
}
SOURCES = {
    "gsm8k": "folder with train.jsonl, or with SPLIT.jsonl for --split SPLIT",
    "reasoning-gym": "NAME?size=1000&seed=0, with any further options of the data set",
    "verifiers": "id of the environment, under which its package is imported",
    "gym": "textarena:ID, gem:ID, or MODULE:FUNCTION, which makes a game",
    "openenv": "address of the server, such as http://127.0.0.1:8000",
    "nemo-gym": "file with JSON lines",
}
"""Describes --source for each set that needs something special. All other sets take any file, folder or pattern of
files."""
NAMED = {"search": "searchqa", "code": "apps", "tools": "xlam"}
"""The default of --data-source, for each name of SETS that covers data sets of several publishers."""
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "python": {"default": "python", "help": "a Python that has the environment's packages"},
    "args": {"default": "{}", "help": "JSON: arguments of the environment"},
    "limit": {"type": int, "help": "the largest number of tasks"},
    "first": {"type": int, "default": 0, "help": "number of the first task: its seed, or its index in the list"},
    "prompt": {"help": "text before the first observation (default: the environment's description)"},
}
"""Options that only some sets have."""
MORE = {
    "verifiers": ("python", "args", "limit"),
    "gym": ("python", "args", "limit", "first"),
    "openenv": ("limit", "first", "prompt"),
}
"""The options in FLAGS that each set has."""
NAMES = {"args": "arguments"}
"""Maps an option to its parameter in the converters, if the names differ."""
DEMONSTRATED = ("gsm8k", "reasoning-gym")
"""The sets whose rows have solutions from which demonstrations can be made."""
SPLIT = "train"
SEEDED = {
    "reasoning-gym": "choose other tasks by their seed: --source 'NAME?size=100&seed=1000'",
    "gym": "choose other tasks by the number of the first one: --first 1000",
}
"""The sets that make a task from its seed, and so have no splits. Maps each to the way to choose other tasks."""
PROGRAMS = {"verifiers": verifiers.PROGRAM, "gym": gym.PROGRAM}
"""Maps a set to the program that plays its episodes, in the Python that --python names."""


def main(argv: Sequence[str]) -> None:
    """The command's entry point."""
    parser = argparse.ArgumentParser(prog="asyncrl data", description="Make task files from published data sets.")
    sets = parser.add_subparsers(dest="set", metavar="SET", required=True)
    for name, meaning in SETS.items():
        one = sets.add_parser(name, help=meaning, description=meaning)
        what = SOURCES.get(name, "file, folder or pattern of files")
        one.add_argument("--source", required=True, help=what)
        one.add_argument("--out", type=Path, help="Parquet file of tasks to write")
        # Every set takes the option, so that a set without demonstrations can say so.
        shown = "Parquet file of demonstrations to write, for asyncrl sft; without --out, no tasks are written"
        one.add_argument("--demonstrations", type=Path, help=shown if name in DEMONSTRATED else argparse.SUPPRESS)
        # The sets of SEEDED take the option, too, so that they can say why it has no effect.
        split = argparse.SUPPRESS if name in SEEDED else f"the split's name: {SPLIT} (default), test ..."
        one.add_argument("--split", help=split)
        one.add_argument("--user", help="name of a simulated user (docs/environments.md), such as checker")
        if name in NAMED:
            one.add_argument(
                "--data-source", default=NAMED[name], help=f"data source of the tasks (default: {NAMED[name]})"
            )
        for flag in MORE.get(name, ()):
            one.add_argument(f"--{flag}", **FLAGS[flag])
    if argv and argv[0] not in SETS and not argv[0].startswith("-"):
        hint = did_you_mean(argv[0], SETS) or f"; use one of {', '.join(SETS)}"
        parser.error(f"unknown set {argv[0]!r}{hint}")
    arguments = parser.parse_args(argv)
    _check_outputs(parser, arguments)
    if arguments.split is not None and arguments.set in SEEDED:
        parser.error(f"--split: the set {arguments.set} has no splits; {SEEDED[arguments.set]}")
    arguments.split = arguments.split or SPLIT
    if arguments.demonstrations:
        _write_demonstrations(arguments)
    if arguments.out:
        _write_tasks(arguments)


def _check_outputs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program with a message if the files to write cannot be written, or if there are none."""
    shown = arguments.demonstrations
    if shown and arguments.set not in DEMONSTRATED:
        parser.error(
            f"--demonstrations: the set {arguments.set} has no solutions from which demonstrations can be made; "
            f"these sets have: {', '.join(DEMONSTRATED)}"
        )
    if shown and arguments.out and shown.resolve() == arguments.out.resolve():
        parser.error(f"--demonstrations and --out are the same file, {shown}; name two files")
    if shown and arguments.user:
        parser.error("--demonstrations end with the answer, but --user continues after it; leave out one of them")
    if not (shown or arguments.out):
        parser.error("name the Parquet file to write: --out tasks.parquet")
    for path in filter(None, (shown, arguments.out)):
        # A file with such a name would later be read as JSON lines. It might also be the source file itself, which
        # would then be overwritten.
        if path.suffix in JSON_SUFFIXES:
            parser.error(f"{path} is written as Parquet; give it a name that ends in .parquet")


def _write_tasks(arguments: argparse.Namespace) -> None:
    source = getattr(arguments, "data_source", "")
    more = {NAMES.get(flag, flag): getattr(arguments, flag) for flag in MORE.get(arguments.set, ())}
    rows, left_out = convert(
        arguments.set, arguments.source, arguments.out, arguments.split, source, arguments.user, print_line, **more
    )
    reason = {"dapo": "are repeated", "code": "have no tests", "nemo-gym": "have no prompt"}.get(arguments.set)
    rest = f"; left out {left_out} rows that {reason}" if left_out else ""
    sys.stdout.write(f"wrote {rows} tasks to {arguments.out}{rest}\n")
    if arguments.set in PROGRAMS:
        command = json.dumps([arguments.python, str(PROGRAMS[arguments.set])])
        sys.stdout.write(f"to play their episodes, set actor.agent_command='{command}'\n")
        if path := os.environ.get("PYTHONPATH"):
            variables = json.dumps({"PYTHONPATH": path})
            sys.stdout.write(f"and, to find your modules, actor.agent_environment='{variables}'\n")


def _write_demonstrations(arguments: argparse.Namespace) -> None:
    rows, left_out = convert_demonstrations(
        arguments.set, arguments.source, arguments.demonstrations, arguments.split, print_line
    )
    rest = "".join(f"; left out {count} rows that {reason}" for reason, count in left_out.items())
    sys.stdout.write(f"wrote {rows} demonstrations to {arguments.demonstrations}{rest}\n")


def convert(
    name: str,
    source: str,
    out: Path,
    split: str = "train",
    data_source: str = "",
    user: str | None = None,
    say: Callable[[str], None] | None = None,
    **more: Any,
) -> tuple[int, int]:
    """Write the tasks of `source` to the Parquet file `out`. Return the numbers of tasks and of rows left out.

    `user`: the name of the simulated user of the tasks, who is told the ground truth. `say` gets lines of progress;
    None: they are logged. `more` are further parameters of the set's converter. Raises DataError.
    """
    named = data_source or NAMED.get(name, "")
    readers: Mapping[str, Callable[[], Iterable[Task | None]]] = {
        "gsm8k": partial(gsm8k.tasks, Path(source), split),
        "math": partial(math_problems.tasks, source),
        "dapo": partial(dapo.tasks, source),
        "search": partial(search.tasks, source, named),
        "code": partial(programs.tasks, source, named),
        "tools": partial(tool_calls.tasks, source, named),
        "reasoning-gym": partial(reasoning_gym.tasks, reasoning_gym.KIND + source),
        "verifiers": partial(verifiers.tasks, source, split, **more),
        "gym": partial(gym.tasks, source, **more),
        "openenv": partial(openenv.tasks, source, split, **more),
        "nemo-gym": partial(nemo_gym.tasks, Path(source), split),
    }
    rows: list[Task | None] = []
    with long_work(f"reading {source}", 0, "rows", say=say) as advance:
        for row in readers[name]():
            rows.append(row)
            advance(1)
    found = [replace(task, extra_info=_extra(task, split, user)) for task in rows if task]
    if not found:
        raise DataError(f"{source} has no row that can become a task")
    return write_tasks(out, found), len(rows) - len(found)


def convert_demonstrations(
    name: str, source: str, out: Path, split: str = "train", say: Callable[[str], None] | None = None
) -> tuple[int, Mapping[LeftOut, int]]:
    """Write demonstrations of the tasks of `source` to the Parquet file `out`. Return their number, and the number of
    rows left out for each reason. `name` is one of DEMONSTRATED, and `say` as in `convert`. Raises DataError."""
    if name == "gsm8k":
        found = gsm8k.demonstrations(Path(source), split)
    else:
        found = reasoning_gym.demonstrations(reasoning_gym.KIND + source)
    shown: list[Sequence[Mapping[str, Any]]] = []
    left_out: Counter[LeftOut] = Counter()
    with long_work(f"reading {source}", 0, "rows", say=say) as advance:
        for each in found:
            if isinstance(each, LeftOut):
                left_out[each] += 1
            else:
                shown.append(each)
            advance(1)
    if not shown:
        why = "".join(f"; {count} rows {reason}" for reason, count in left_out.items())
        raise DataError(f"{source} has no row that can become a demonstration{why}")
    write_conversations(out, shown)
    return len(shown), left_out


def _extra(task: Task, split: str, user: str | None) -> dict[str, Any]:
    of_user = {"interaction_kwargs": {"name": user, "ground_truth": task.ground_truth}} if user else {}
    return {"split": split, **of_user, **task.extra_info}
