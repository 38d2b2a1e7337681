"""`asyncrl demo`: prepare the demo, train, and show the result. It takes KEY=VALUE words like `asyncrl train`.

`--json` also prints the results as a last line of JSON. `--model-only DIR` only makes the policy that the demo trains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from asyncrl.commands.demo.prepare import (
    CACHE,
    SEED,
    Prepared,
    make_policy,
    prepare_demo,
    prepared_files,
    prepared_overrides,
)
from asyncrl.commands.demo.summary import audit, try_next, written_once
from asyncrl.config import locations
from asyncrl.config.exits import EXIT_STOPPED, exit_status
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.launch.local import train
from asyncrl.launch.plan import run_or_plan, without_option
from asyncrl.machine import process
from asyncrl.runs.run import Run

MOST_THREADS = 4
SHOWS_CONFIGURATION = ("-c", "--cfg")
"""Options with which the demo only prints its configuration. The files that the configuration names may not be prepared
yet."""


def run(config: TrainConfig, as_json: bool = False) -> int:
    """Train, and report the result for people. With `as_json`, a last line repeats the result for programs."""
    run_dir = locations.run_dir(config.run)
    if not train(config):
        return EXIT_STOPPED
    found = audit(run_dir, config.replay.sampler.max_times_sampled)
    sys.stderr.write(
        f"  {'audit':<19}{found['lost']} trajectories lost, {found['trained_twice']} trained twice\n"
        f"{written_once(run_dir, config.scoring.shaping.process_weight)}"
        f"{try_next(run_dir)}"
    )
    if as_json:
        sys.stdout.write(json.dumps({**Run(run_dir).summary(), **found}) + "\n")
    return 0


def preparation_threads(cpus: int) -> int:
    """The number of threads that prepare the demo on `cpus` CPUs."""
    # Threads of a small model wait for each other at every operation, so a single busy CPU delays all of them.
    return max(1, min(MOST_THREADS, cpus // 2))


def main(argv: Sequence[str]) -> int:
    """Prepare, train and show the demo, and return the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model-only", type=Path, metavar="DIR")
    given, words = parser.parse_known_args(argv)
    train_and_show = partial(run, as_json=given.json)
    if {"--help", "-h"} & set(words):
        return role_main(train_and_show, words)
    if any(word.startswith(SHOWS_CONFIGURATION) for word in words):
        return role_main(train_and_show, [*prepared_overrides(prepared_files(CACHE, SEED)), *words])
    if given.model_only is not None:
        return _make_model(given.model_only)
    # The command line is checked before the files are prepared. So the check gets this Python file in place of each
    # prepared file.
    checked = [*prepared_overrides(Prepared(*[Path(__file__)] * 4)), *words]
    if without_option(checked)[1]:
        return run_or_plan(train_and_show, checked)
    if refused := role_main(lambda _: None, checked):
        return refused
    process.set_thread_variables(preparation_threads(len(os.sched_getaffinity(0))))
    prepared = prepare_demo(CACHE, SEED, _show)
    return role_main(train_and_show, [*prepared_overrides(prepared), *words])


def _make_model(folder: Path) -> int:
    process.set_thread_variables(preparation_threads(len(os.sched_getaffinity(0))))
    make_policy(folder, CACHE, SEED, _show)
    _show(f"the demo's policy is in {folder}: a Hugging Face folder, for model.path={folder}")
    return 0


def _show(text: str) -> None:
    Console(stderr=True).print(f"[dim]{text}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl demo"))
