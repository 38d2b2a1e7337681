"""`asyncrl demo`: prepare the demo, train, and show the result. It takes KEY=VALUE words like `asyncrl train`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from asyncrl.commands.demo.prepare import CACHE, SEED, Prepared, prepare_demo, prepared_overrides
from asyncrl.commands.demo.summary import audit, draw
from asyncrl.config import locations
from asyncrl.config.exits import EXIT_STOPPED, exit_status
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.launch.local import train
from asyncrl.launch.plan import run_or_plan, without_option
from asyncrl.machine import process
from asyncrl.runs.run import Run

MOST_THREADS = 4


def run(config: TrainConfig) -> int:
    """Train, and report the result: a picture and a summary for people, and a last line of JSON for programs."""
    run_dir = locations.run_dir(config.run)
    if not train(config):
        return EXIT_STOPPED
    draw(run_dir, run_dir / "curve.png")
    sys.stderr.write(f"  {'curves':<19}{run_dir / 'curve.png'}\n{try_next(run_dir)}")
    summary = Run(run_dir).summary()
    sys.stdout.write(json.dumps({**summary, **audit(run_dir, config.replay.sampler.max_times_sampled)}) + "\n")
    return 0


def try_next(run_dir: Path) -> str:
    """Commands to try after the demo, each with its effect, in two columns."""
    things = {
        f"asyncrl dashboard {run_dir}": "a page with curves and episodes of the run",
        f"asyncrl inspect list {run_dir} --sort reward": "the episodes, the best first",
        "asyncrl demo run.name=dapo algorithm=dapo": "the demo with another algorithm",
        "docs/first_run.md": "data, a tool and a reward of your own, step by step",
    }
    width = max(map(len, things)) + 2
    return "\nFour things to try next:\n" + "".join(f"  {command:<{width}}{what}\n" for command, what in things.items())


def preparation_threads(cpus: int) -> int:
    """The number of threads that prepare the demo on `cpus` CPUs."""
    # Threads of a small model wait for each other at every operation, so a single busy CPU delays all of them.
    return max(1, min(MOST_THREADS, cpus // 2))


def main(argv: Sequence[str]) -> int:
    """Prepare, train and show the demo, and return the exit status."""
    if {"--help", "-h", "--cfg", "-c"} & set(argv):
        return role_main(run, argv)
    # The command line is checked before the preparation. An existing file replaces each prepared file in this check.
    checked = [*prepared_overrides(Prepared(*[Path(__file__)] * 4)), *argv]
    if without_option(checked)[1]:
        return run_or_plan(run, checked)
    if refused := role_main(lambda _: None, checked):
        return refused
    console = Console(stderr=True)
    process.limit_threads(preparation_threads(len(os.sched_getaffinity(0))))
    prepared = prepare_demo(CACHE, SEED, lambda text: console.print(f"[dim]{text}", highlight=False))
    return role_main(run, [*prepared_overrides(prepared), *argv])


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl demo"))
