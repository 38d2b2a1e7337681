"""Runs the tests many times, to find those that fail by chance.

    python -m tests.repeated --runs 20 --cores 2 -- PYTEST_ARGUMENTS

Each run has a set of `--cores` CPUs. `--at-once` runs go at the same time, by default one on each set. With more, runs
share their set, so that its CPUs are kept busy.

The output of a run is in runs/repeated/NUMBER.log. `make test-repeated` gives the arguments of `make test`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

LOGS = Path("runs/repeated")
FAILED = ("FAILED ", "ERROR ")
"""The beginnings of the lines in pytest's summary that name a test without success."""


def main(arguments: Sequence[str] | None = None) -> None:
    given = command_line().parse_args(arguments)
    sets = cpu_sets(sorted(os.sched_getaffinity(0)), given.cores)
    at_once = given.at_once or len(sets)
    LOGS.mkdir(parents=True, exist_ok=True)
    free: SimpleQueue[Sequence[int]] = SimpleQueue()
    for number in range(at_once):
        free.put(sets[number % len(sets)])
    failures = defaultdict[str, list[int]](list)
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run, number, free, given.pytest): number for number in range(1, given.runs + 1)}
        try:
            for done in as_completed(running):
                for test in done.result():
                    failures[test].append(running[done])
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit(130)
    for test, runs in sorted(failures.items()):
        say(f"failed in {len(runs)} of {given.runs} runs ({', '.join(map(str, sorted(runs)))}): {test}")
    clean = given.runs - len(set().union(*failures.values()))
    say(f"{clean} of {given.runs} runs were clean. {at_once} went at once, on {len(sets)} sets of {given.cores} CPUs")
    sys.exit(clean < given.runs)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="number of runs (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="number of CPUs of a set (default: %(default)s)")
    parser.add_argument("--at-once", type=int, help="number of runs at the same time (default: number of sets)")
    parser.add_argument("pytest", nargs="*", metavar="PYTEST_ARGUMENT", help="arguments of pytest, after --")
    return parser


def cpu_sets(cpus: Sequence[int], size: int) -> list[Sequence[int]]:
    """Divide CPUs into sets of `size`. If there are fewer CPUs, they are the only set."""
    return [cpus[start : start + size] for start in range(0, len(cpus) - size + 1, size)] or [cpus]


def run(number: int, free: SimpleQueue[Sequence[int]], arguments: Sequence[str]) -> list[str]:
    """Run the tests on a free set of CPUs. Returns the names of the failed tests, or how pytest ended without any."""
    cpus = free.get()
    log = LOGS / f"{number}.log"
    began = time.monotonic()
    command = ["taskset", "--cpu-list", ",".join(map(str, cpus)), sys.executable, "-m", "pytest", "-q"]
    with log.open("wb") as output:
        status = subprocess.call(
            [*command, "-p", "no:cacheprovider", *arguments], stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    free.put(cpus)
    lines = log.read_text(errors="replace").splitlines()
    failed = [line.split(" - ")[0].split(maxsplit=1)[1] for line in lines if line.startswith(FAILED)]
    failed = failed or ([f"pytest ended with status {status}: see {log}"] if status else [])
    words = f"{len(failed)} failed" if failed else "clean"
    say(f"run {number}: {words} after {time.monotonic() - began:.0f} s")
    return failed


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
