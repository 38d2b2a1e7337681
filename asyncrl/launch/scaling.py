"""`asyncrl scale RUN actors=8 scorers=2`: changes the numbers of actors and scorers while the run goes on.

The command writes the wished numbers into a file in the run's folder. The process that supervises the run reads the
file, starts or stops processes, and answers in another file. This works with every launcher, and on every host that
shares the folder.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from asyncrl.config.locations import refuse_fine_tuning
from asyncrl.config.schema.cluster import MOST
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.ownership import NotRunningError
from asyncrl.machine.files import write_whole
from asyncrl.machine.owner import owner_of
from asyncrl.runs.finding import require_run

log = logging.getLogger("asyncrl.train")

SCALED = ("actors", "scorers")
WISH_FILE, ANSWER_FILE, LOCK_FILE = "scale.json", "scale-answer.json", "scale.lock"
POLL_S = 0.2


class Scaler:
    """Serves `asyncrl scale`: `scale` gets the wished counts by name, and raises ConfigError if they are impossible. A
    wish that is older than this object is deleted.
    """

    def __init__(self, run_dir: Path, scale: Callable[[Mapping[str, int]], None]) -> None:
        self._wish, self._answer, self._scale = run_dir / WISH_FILE, run_dir / ANSWER_FILE, scale
        self._wish.unlink(missing_ok=True)

    def update(self) -> None:
        """Serve a wish, if there is one. Called at every poll of the supervisor."""
        try:
            content = self._wish.read_bytes()
            self._wish.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read, so `asyncrl scale` gets no answer: %s", self._wish, error)
            return
        try:
            wish = json.loads(content)
            name, counts = wish["id"], dict(wish["counts"])
        except (ValueError, KeyError, TypeError) as error:
            log.warning("removed %s, which `asyncrl scale` did not write: %r", self._wish, error)
            return
        refused = ""
        try:
            self._scale(parse_counts([f"{each}={count}" for each, count in counts.items()]))
            log.info("scaled to %s", in_words(counts))
        except ConfigError as error:
            refused = str(error)
            log.warning("not scaled to %s: %s", in_words(counts), refused)
        try:
            write_whole(self._answer, json.dumps({"id": name, "refused": refused}))
        except OSError as error:
            log.warning("%s cannot be written, so `asyncrl scale` gets no answer: %s", self._answer, error)


def in_words(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in counts.items())


def parse_counts(words: Sequence[str]) -> dict[str, int]:
    """Parse counts such as actors=8. Raises ConfigError, with a line for each wrong word."""
    counts, problems = {}, []
    for word in words:
        name, _, number = word.partition("=")
        if name not in SCALED or not number.isdecimal() or not 1 <= int(number) <= MOST:
            problems.append(f"{word}: write {' or '.join(f'{each}=N' for each in SCALED)}, with N from 1 to {MOST:,}")
        elif name in counts:
            problems.append(f"{word}: {name} is given twice; keep one of the two")
        else:
            counts[name] = int(number)
    if problems:
        raise ConfigError("\n".join(problems))
    return counts


def ask(run_dir: Path, counts: Mapping[str, int], timeout_s: float) -> None:
    """Ask the supervisor of a run to scale it; concurrent calls take turns. Raises ConfigError: it refuses;
    UnavailableError: no answer came in time."""
    with (run_dir / LOCK_FILE).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _ask(run_dir, counts, timeout_s)


def _ask(run_dir: Path, counts: Mapping[str, int], timeout_s: float) -> None:
    wish = {"id": uuid4().hex, "counts": dict(counts)}
    write_whole(run_dir / WISH_FILE, json.dumps(wish))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = run_dir / ANSWER_FILE
        if answer.exists() and (said := json.loads(answer.read_text()))["id"] == wish["id"]:
            if said["refused"]:
                raise ConfigError(said["refused"])
            return
        time.sleep(POLL_S)
    (run_dir / WISH_FILE).unlink(missing_ok=True)
    raise UnavailableError(f"{run_dir}: no `asyncrl train` has answered for {timeout_s:g} s; check that the run works")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see asyncrl scale --help")


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = _Parser(prog="asyncrl scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    parser.add_argument("counts", nargs="+", metavar="NAME=N", help="actors=N or scorers=N")
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="seconds to wait for the answer (30)")
    given = parser.parse_args(argv)
    run_dir, counts = require_run(given.run).folder, parse_counts(given.counts)
    refuse_fine_tuning(run_dir)
    if owner_of(run_dir) is None:
        raise NotRunningError(
            f"no `asyncrl train` runs {run_dir}; `asyncrl resume {shlex.quote(str(run_dir))}` continues it"
        )
    ask(run_dir, counts, given.wait)
    sys.stdout.write(f"scaled to {in_words(counts)}\n")
